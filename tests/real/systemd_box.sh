#!/bin/bash
# systemd_box.sh FOLDER: boot this machine's root under a real systemd, run FOLDER/run as root in it, power off.
#
# FOLDER is /box inside and the only thing that outlives the box: all other writes go to memory and are dropped.
# FOLDER/kept/etc+systemd+system stands at /etc/systemd/system inside, and so on for every folder in kept.
# What the script prints lands in FOLDER/output; its exit status is ours. Network: loopback only.
# Needs root and systemd-nspawn (Debian, Ubuntu: apt-get install systemd-container).
set -euo pipefail
folder=$(realpath "$1")
name=dflash-box-$$

cat > "$folder/box.service" <<UNIT
[Unit]
Wants=dbus.socket
After=basic.target dbus.socket
SuccessAction=exit-force
FailureAction=exit-force
[Service]
Type=oneshot
ExecStart=/bin/bash /box/run
StandardOutput=truncate:/box/output
StandardError=inherit
UNIT

kept=()
for place in "$folder"/kept/*; do
  [ -d "$place" ] || continue
  inside=${place##*/}
  kept+=("--bind=$place:/${inside//+//}")
  # A file to mount the box's own unit on.
  [ "$inside" != etc+systemd+system ] || touch "$place/box.service"
done

# systemd takes over the control group that it finds itself in, so it gets one of its own in every hierarchy
# that tracks processes (one where only cgroup2 is mounted, two where the old layout still stands beside it).
groups=()
for root in /sys/fs/cgroup/systemd /sys/fs/cgroup/unified /sys/fs/cgroup; do
  [ -e "$root/cgroup.procs" ] && groups+=("$root/$name")
done
leave() {
  set +e
  # Cut short: what runs in the box does not die with nspawn, so everything in its control groups is ended.
  if [ -n "$box" ]; then
    { kill -KILL "$box"; wait "$box"; } 2>/dev/null
    for _ in {1..50}; do
      inside=$(find "${groups[@]}" -name cgroup.procs -exec cat {} + | sort -u)
      [ -n "$inside" ] || break
      # shellcheck disable=SC2086 - a list of numbers
      kill -KILL $inside 2>/dev/null
      sleep 0.1
    done
  fi
  for group in "${groups[@]}"; do
    for _ in {1..50}; do
      find "$group" -depth -type d -exec rmdir {} + 2>/dev/null
      [ -d "$group" ] || break
      sleep 0.1
    done
  done
}
box=
trap leave EXIT
trap 'exit 143' INT TERM

(
  for group in "${groups[@]}"; do
    mkdir "$group"
    echo "$BASHPID" > "$group/cgroup.procs"
  done
  # In a mount namespace of its own: nspawn wants a writable /run/systemd, and a root that is not "/" by name.
  export SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1
  exec unshare --mount --propagation private bash -euc '
    mount -t tmpfs tmpfs /run/systemd
    mkdir /run/systemd/box-root
    mount --bind / /run/systemd/box-root
    exec systemd-nspawn --quiet --machine="$1" --directory=/run/systemd/box-root --volatile=overlay \
      --register=no --keep-unit --private-network --link-journal=no --resolv-conf=off --timezone=off \
      "${@:3}" --bind="$2:/box" --bind-ro="$2/box.service:/etc/systemd/system/box.service" \
      --console=pipe --boot systemd.unit=box.service systemd.show_status=no
  ' - "$name" "$folder" "${kept[@]}"
) </dev/null >"$folder/console" 2>&1 &
box=$!
status=0
wait "$box" || status=$?
box=
exit "$status"
