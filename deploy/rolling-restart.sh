#!/bin/sh
# Restart the replicas one by one: rolling-restart.sh 8001 8002 8003
# RESTART is the command that restarts one (its port is appended). A replica that does not become ready ends the
# script, so that a bad release never reaches the next one.
set -eu
RESTART=${RESTART:-restart_unit}
restart_unit() { systemctl restart "bitfit@$1"; }

for port in "$@"; do
    $RESTART "$port"
    tries=0
    until curl --silent --fail --max-time 6 --output /dev/null "http://127.0.0.1:$port/readyz"; do
        tries=$((tries + 1))
        [ "$tries" -lt 120 ] || { echo "replica $port is not ready; stopped" >&2; exit 1; }
        sleep 1
    done
    sleep "${SETTLE:-2}" # watch_replicas.py puts it back on the list
done
