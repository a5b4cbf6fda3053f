#!/usr/bin/env bash
# The cluster's own authority, and a certificate and key for each box, user or operator:
#
#   bash make-keys.sh DIRECTORY NAME[=ROLE[,ROLE]]...
#   bash make-keys.sh DIRECTORY --revoke NAME...
#
# ROLE: node:RANK (that rank only; draft node d > 0 has rank 1000 + d), node (any rank: the default),
# client (may ask), operator (may ask and record traces). Nodes may ask, too.
# DIRECTORY is made, readable by its owner alone, if it does not exist.
# Copy ca.pem, NAME.pem and NAME.key to each box, beside its cluster file, as ca.pem, node.pem and
# node.key. Keep ca.key off the boxes: whoever has it can make members. --revoke writes crl.pem, which
# goes to every box that names it in [security] crl.
set -euo pipefail
if [ $# -lt 1 ]; then
  echo "usage: bash make-keys.sh DIRECTORY NAME[=ROLE[,ROLE]]... | --revoke NAME..." >&2
  exit 2
fi
[ -d "$1" ] || mkdir -p -m 700 -- "$1"
cd -- "$1"
shift
umask 077
days=3650

if [ ! -f ca.key ]; then
  openssl req -x509 -newkey ed25519 -nodes -days "$days" -subj "/CN=asyncspec cluster" \
    -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign" \
    -keyout ca.key -out ca.pem
fi
if [ "${1:-}" = --revoke ]; then
  shift
  touch revoked.txt
  authority() {
    openssl ca -config <(printf '%s\n' "[ca]" "default_ca=own" "[own]" "database=revoked.txt" \
      "certificate=ca.pem" "private_key=ca.key" "default_md=default" "unique_subject=no") "$@"
  }
  for name in "$@"; do
    if [ ! -f "$name.pem" ]; then
      echo "$name: there is no certificate $name.pem" >&2
      exit 2
    fi
  done
  for name in "$@"; do
    serial=$(openssl x509 -in "$name.pem" -noout -serial)
    # openssl fails for what is revoked already.
    grep -q "^R.*[[:space:]]${serial#serial=}[[:space:]]" revoked.txt || authority -revoke "$name.pem"
  done
  authority -gencrl -crldays "$days" -out crl.pem
  exit
fi
for given in "$@"; do
  name=${given%%=*}
  roles=node
  [ "$name" = "$given" ] || roles=${given#*=}
  names=
  for role in ${roles//,/ }; do
    if ! [[ $role =~ ^(node|node:[0-9]+|client|operator)$ ]]; then
      echo "$given: the role $role is none of node, node:RANK, client, operator" >&2
      exit 2
    fi
    names+="${names:+,}URI:urn:asyncspec:$role"
  done
  openssl req -newkey ed25519 -nodes -subj "/CN=$name" -keyout "$name.key" -out "$name.csr"
  openssl x509 -req -in "$name.csr" -CA ca.pem -CAkey ca.key -days "$days" -out "$name.pem" \
    -extfile <(printf '%s\n' "basicConstraints=CA:FALSE" "extendedKeyUsage=serverAuth,clientAuth" \
      "subjectAltName=$names")
  rm "$name.csr"
done
