#!/usr/bin/env bash
# The cluster's own authority, and a certificate and key for each box:
#
#   bash make-keys.sh DIRECTORY BOX...
#
# DIRECTORY is made, readable by its owner alone, if it does not exist.
# Copy ca.pem, BOX.pem and BOX.key to each box, beside its cluster file, as ca.pem, node.pem and
# node.key. Keep ca.key off the boxes: whoever has it can make members. A client (asyncspec run
# --config) needs a certificate too; give it a name of its own.
set -euo pipefail
if [ $# -lt 1 ]; then
  echo "usage: bash make-keys.sh DIRECTORY BOX..." >&2
  exit 2
fi
[ -d "$1" ] || mkdir -p -m 700 -- "$1"
cd -- "$1"
shift
umask 077
days=3650

if [ ! -f ca.key ]; then
  openssl req -x509 -newkey ed25519 -nodes -days "$days" -subj "/CN=asyncspec cluster" \
    -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign" \
    -keyout ca.key -out ca.pem
fi
for box in "$@"; do
  openssl req -newkey ed25519 -nodes -subj "/CN=$box" -keyout "$box.key" -out "$box.csr"
  openssl x509 -req -in "$box.csr" -CA ca.pem -CAkey ca.key -days "$days" -out "$box.pem" \
    -extfile <(printf 'basicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth,clientAuth\n')
  rm "$box.csr"
done
