#!/bin/sh
# A command of asyncspec (serve, up, join, keys, ...) as it is; anything else are arguments of asyncspec-node.
case "${1-}" in
  "" | -*) exec asyncspec-node "$@" ;;
  *) exec asyncspec "$@" ;;
esac
