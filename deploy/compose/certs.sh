#!/bin/sh
# Makes the certificates of the Compose file's roles, in a volume for each role. The key of the CA is in a volume of its own,
# which no role mounts. A further call changes nothing, unless the hosts have changed or the certificates are half a year
# old: the same CA then issues new ones, which running processes use without a restart.
#
#     certs.sh HOST...    the hosts, as `shoal certs init --host` takes them
set -eu

folder=/var/lib/shoal/tls
roles="coordinator server worker submitter reader"
# The hosts of the current certificates. An earlier version, whose certificates did not name their roles, had another file.
issued=$folder/ca/issued
if [ "$(cat $issued 2> /dev/null)" = "$*" ] && [ -n "$(find $issued -mtime -182)" ] && [ -f $folder/worker/trainer.pem ]; then
    exit
fi

# Replaces a file in one step, so that no process reads half of it.
put() {
    cp "$1" "$2.new"
    chmod "$3" "$2.new"
    mv "$2.new" "$2"
}

hosts=$*
for host; do
    set -- "$@" --host "$host"
    shift
done
if [ -f $folder/ca/ca-key.pem ]; then
    set -- "$@" --ca $folder/ca
fi
new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT
shoal certs init "$new/certs" "$@" > /dev/null

put "$new/certs/ca.pem" $folder/ca/ca.pem 644
put "$new/certs/ca-key.pem" $folder/ca/ca-key.pem 600
# Trainers present another certificate than their worker: it names no role, so it gives no rights.
put "$new/certs/trainer.pem" $folder/worker/trainer.pem 644
put "$new/certs/trainer-key.pem" $folder/worker/trainer-key.pem 600
for role in $roles; do
    key=600
    # Prometheus is another user, of the same group.
    [ $role = reader ] && key=640
    put "$new/certs/ca.pem" $folder/$role/ca.pem 644
    put "$new/certs/$role.pem" $folder/$role/cert.pem 644
    put "$new/certs/$role-key.pem" $folder/$role/key.pem $key
done
echo "$hosts" > $issued
echo "made certificates for: $hosts"
