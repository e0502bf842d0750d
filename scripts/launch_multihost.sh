#!/usr/bin/env bash
# Starts one command as many processes that find each other through mpmd.initialize(): on this machine, on hosts over
# ssh, or in a Slurm allocation. `--help` lists the options; docs/multihost.md explains more.
#
# With --restarts it also starts a keeper on each host: a small Python process that keeps copies of the ranks' state
# (mpmd.resilient) in its memory until the launcher is gone. Keepers outlive attempts; agents do not.
#
# It needs bash 4.4, coreutils, grep, sed, setsid (util-linux) and ssh, and can be copied alone to any machine.
#
# How it works. The launcher sends its own text to one agent per host (per task under Slurm) through ssh, srun or a pipe.
# An agent starts its ranks, each in its own session. The agent prints their lines on its stdout and stderr, each with its
# rank in front. Its own messages to the launcher are lines on stderr that begin with "@C". The launcher's commands come on
# the agent's stdin. When stdin ends (the launcher is gone, or the connection dropped), the agent ends its ranks. It finds
# a rank's processes in any session by a mark in their environment.

# shellcheck disable=SC2015 # `a && b || c` is intended: c runs also if b fails
set -uf # globbing off: messages are split into words

# Our variables are in lower case. The caller's variables in lower case (http_proxy) are set aside, and given to the
# ranks. So is TMOUT, which would end our reads.
# shellcheck disable=SC2016 # evaluated later, here and in the agents
readonly set_aside='own_words=() && while IFS= read -r name; do
  [[ ! $name =~ ^([a-z_][a-z_0-9]*|TMOUT)$ || $name == _ ]] || { own_words+=("$name=${!name}") && unset "$name"; }
done < <(compgen -e)'

readonly grace_s=8       # after a failure, time for the other ranks to print their table and end
readonly let_go_s=3      # time for the rank to blame to end, when all other ranks have ended; within grace_s
readonly term_s=5        # between SIGTERM and SIGKILL
readonly beat_s=5        # between the launcher's signs of life to agents on other hosts
readonly silence_s=30    # after this time without a sign of life, such an agent assumes that the launcher is dead
readonly connect_s=60    # for a host to answer
readonly keeper_s=15     # for a keeper to start
readonly num_last_lines=20
readonly most=9999       # the largest number of processes on a host, of devices of a process, and of restarts
readonly longest_wait_s=300 long_attempt_s=600 # between two attempts; after an attempt this long, the wait is 1 s again
readonly unfit_status=192 # killed by signal 64, SIGRTMAX: its devices are slow or compute wrong
readonly most_alike=3    # it gives up after this many failures with the same status at the same step
readonly contract=(MPMD_COORDINATOR MPMD_NUM_PROCESSES MPMD_PROCESS_ID MPMD_LOCAL_ID MPMD_SERVICE MPMD_STATUS_DIR
  MPMD_NUM_SPARES MPMD_LOCAL_ONLY MPMD_ATTEMPT MPMD_JOB MPMD_KEEPER MPMD_KEEPER_TOKEN)
# shellcheck disable=SC2016 # for the inner shell to expand
readonly as_it_is=("$(type -P sh)" -c 'exec "$0" "$@"') # env takes a command with = in its path for a variable
readonly forwarded='^(PATH|PYTHONPATH|VIRTUAL_ENV|LD_LIBRARY_PATH|(JAX|XLA|MPMD|NCCL|CUDA)_.*)$'

usage() {
  cat <<'END'
usage: launch_multihost.sh [options] -- command...

Starts the command once per process, with everything that mpmd.initialize() needs in its environment.

  -n, --procs-per-host N    processes on each host (default 1; under Slurm as in the allocation)
  -H, --hosts h1,h2:4,...   hosts to reach over ssh, in this order; h:K overrides -n; user@h is allowed; `localhost` is
                            this machine, without ssh (default: this machine)
      --cpu-devices K       each process sees K CPU devices and no GPU (default: as the environment says)
      --gpus-per-process K  each process sees K GPUs of its own (default: as the environment says)
      --port P              port of the coordination service (default: a free one from 20000 to 29999)
      --hang-timeout S      seconds without progress after which the watchdog ends the job; 0: never
                            (default: as the program says in mpmd.initialize, else 300)
      --restarts R          start over after a failure, up to R times (default 0), after 1, 2, 4, ... 300 s; not after
                            three equal failures at the same step. What mpmd.resilient has kept in memory is still there;
                            if a process is killed while all others are in it, another one is started in its place, and
                            nothing starts over
      --min-hosts M         go on without hosts that do not answer, as long as M are left (default: all)
      --spares K            K more processes that wait (default 0), on the last host or, evenly, on the last hosts if these are
                            named as h:0. One takes the place of a process that is killed, sooner than one that is started
                            then, which waits in its stead. They also take the places of all ranks of a host that is lost
                            (not the first one), if they are on other hosts. When starting over without a host, spares
                            compute. Needs --restarts
      --replace-slow K      replaces a process by a spare if its devices take K times as long for a step as they usually do,
                            and those of the others do not (K above 1; default: never). Needs --spares
      --log-dir DIR         also write each rank's output to DIR/rank-N.log, what its time goes to (DIR/rank-N.ledger),
                            and after a failure what it did last (default: no files)
      --ssh COMMAND         how to reach a host (default: $MPMD_SSH, or ssh)
      --env NAME[=VALUE]    set or forward one more variable (may be repeated; default: none)
      --dry-run             print what would run where, and start nothing
  -h, --help                this text

Inside a Slurm allocation and without -H the processes are tasks of one srun step (options: $MPMD_SRUN). Spares are the last K
of these tasks, and --min-hosts needs an allocation with --no-kill.

examples:
  launch_multihost.sh -n 4 --cpu-devices 1 -- python examples/train_gpt.py
  launch_multihost.sh -n 8 --gpus-per-process 1 --log-dir logs -- python train.py
  launch_multihost.sh -H node1,node2:4 -n 8 --gpus-per-process 1 --port 5000 -- python train.py
  launch_multihost.sh -n 4 --cpu-devices 1 --restarts 9 --spares 1 -- python examples/train_gpt.py
  launch_multihost.sh -H ann@10.0.0.1,ann@10.0.0.2 --ssh "ssh -p 2222 -i key" -- python train.py
  sbatch --nodes 2 --ntasks-per-node 4 --wrap "scripts/launch_multihost.sh -- python train.py"

exit status: 0 when all ranks end with 0; else that of the rank that failed first (128 + N when signal N ended it);
75 when the watchdog ended the job; 2 for a wrong option; 126 or 127 for a command that cannot be run or is not found;
69 for a host or port that cannot be used; 130, 143 or 129 after Ctrl-C, SIGTERM or SIGHUP.
END
}

say() { printf 'jax-mpmd: %s\n' "$1" >&2; }
die() { say "$2" && exit "$1"; }
option_error() { die 2 "$1 (see --help)"; }

# --- used by both sides -----------------------------------------------------------------------------------------------

# Sets rank_environment, the variables of one rank. Arguments: rank, index on its host, address, "yes" if the launcher
# runs the coordination service, status folder.
set_rank_environment() {
  rank_environment=("MPMD_COORDINATOR=$3" "MPMD_NUM_PROCESSES=$num_ranks" "MPMD_PROCESS_ID=$1" "MPMD_LOCAL_ID=$2")
  if ((num_processes > num_ranks)) || is_recoverable "$4"; then
    rank_environment+=("MPMD_NUM_SPARES=$((num_processes - num_ranks))")
    [[ -z $replace_slow ]] || rank_environment+=("MPMD_REPLACE_SLOW=$replace_slow")
  fi
  [[ -z $hang_timeout_s ]] || rank_environment+=("MPMD_HANG_TIMEOUT_S=$hang_timeout_s")
  [[ $4 != yes ]] || rank_environment+=("MPMD_SERVICE=external")
  rank_environment+=("MPMD_STATUS_DIR=$5")
  [[ $local_only != yes ]] || rank_environment+=("MPMD_LOCAL_ONLY=1")
  rank_environment+=("MPMD_ATTEMPT=$attempt")
  [[ -z $keeper ]] || rank_environment+=("MPMD_KEEPER=$keeper" "MPMD_KEEPER_TOKEN=$keeper_token")
  [[ -z $log_dir || -n ${MPMD_FLIGHT_DIR:-} ]] || rank_environment+=("MPMD_FLIGHT_DIR=$log_dir")
  [[ -z $log_dir || -n ${MPMD_LEDGER_DIR:-} ]] || rank_environment+=("MPMD_LEDGER_DIR=$log_dir")
  if [[ -n $cpu_devices ]]; then
    rank_environment+=("JAX_PLATFORMS=cpu" "JAX_NUM_CPU_DEVICES=$cpu_devices" "CUDA_VISIBLE_DEVICES=")
  elif [[ -n $gpus_per_process ]]; then
    rank_environment+=("CUDA_VISIBLE_DEVICES=$(gpus_of "$2")")
  fi
}

# Whether killed processes may be replaced: the launcher starts replacements, and its coordination service accepts them.
is_recoverable() { ((restarts > 0)) && [[ $1 == yes ]]; } # "yes" if it runs the service

# The GPUs of the process with this index on its host: a slice of CUDA_VISIBLE_DEVICES, or of 0, 1, 2, ...
gpus_of() {
  local -a visible=() own=()
  local i gpu
  IFS=, read -ra visible <<<"${CUDA_VISIBLE_DEVICES:-}"
  # srun --gpus-per-task already shows each task only its own GPUs.
  [[ $transport != slurm ]] || ((${#visible[@]} != gpus_per_process)) || { printf '%s' "$CUDA_VISIBLE_DEVICES" && return; }
  for ((i = $1 * gpus_per_process; i < ($1 + 1) * gpus_per_process; i++)); do
    gpu=$i
    ((${#visible[@]} == 0)) || gpu=${visible[i]:-}
    own+=("$gpu")
  done
  (IFS=, && printf '%s' "${own[*]}")
}

command_line() { # prints the words, quoted only where a shell needs it
  local word
  for word; do
    [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]] || printf -v word %q "$word"
    printf '%s ' "$word"
  done
}

# --- the agent: one per host, or per Slurm task ---------------------------------------------------------------------

tell() { printf '@C %s\n' "$*" >&2; }                     # sends to the launcher
fail() { tell error "$@" && exit 0; }                 # arguments: status and text; before any rank is started
event() { printf '%s\n' "$*" >&"$events"; }           # sends to the agent's own loop

# Reads a line into the caller's `line`, with the status of `read`. If a timeout comes in the middle of a line, `read` has
# already taken its first part out of the pipe, so that part is kept for the next call.
read_line() { # file descriptor, seconds (none: no limit)
  local part='' status
  IFS= read -r ${2:+-t "$2"} -u "$1" part
  status=$?
  unread=${unread:-}$part
  ((status == 0)) || return "$status"
  line=$unread unread=
}

agent() {
  service_pid='' service_life='' stopping='' hurry='' finished='' failed_at='' num_running=0 num_open=0 pumps=()
  trap '' PIPE
  trap 'event signal TERM' TERM
  trap 'event signal HUP' HUP
  trap 'event signal INT' INT
  exec {commands}<&0 </dev/null
  work=$(mktemp -d "${TMPDIR:-/tmp}/jax-mpmd.XXXXXX") || fail 69 "no temporary folder in ${TMPDIR:-/tmp}"
  head -c 100000 /dev/zero 2>/dev/null >"$work/space" || {
    rm -r "$work"
    fail 69 "no space in ${TMPDIR:-/tmp}"
  }
  rm "$work/space"
  trap 'rm -rf "$work"' EXIT
  mkdir "$work/status"
  mkfifo "$work/events" "$work/life" && exec {events}<>"$work/events" {life}<>"$work/life"
  if [[ $transport == slurm ]]; then
    agent_index=$SLURM_PROCID ranks=("$SLURM_PROCID") local_ids=("$SLURM_LOCALID") keeper=${keepers[$SLURMD_NODENAME]:-}
  fi
  mark="MPMD_JOB=$job.$agent_index"
  prepare
  listen >/dev/null 2>&1 &
  guard >/dev/null 2>&1 &
  local port=-
  if ((agent_index == 0)); then
    port=$(choose_port) || fail 69 "port $wanted_port is in use"
    [[ $serve == no ]] || ! find_mpmd || start_service "$port"
  fi
  tell ready "$agent_index" "$(agent_address)" "$port" "${service_pid:+yes}"
  while [[ -z $finished ]]; do wait_for_event 60; done
}

agent_address() { printf '%s' "${SLURMD_NODENAME:-$(hostname 2>/dev/null || cat /proc/sys/kernel/hostname)}"; }

# Sets the environment, and changes to the folder.
enter() {
  local assignment
  for assignment in "${environment[@]}"; do
    [[ $transport != ssh || $assignment != PATH=* ]] || assignment+=:$PATH # the other machine's own PATH comes second
    [[ $transport != ssh ]] && own_words+=("$assignment") || export "${assignment?}"
  done
  cd -- "$folder" 2>/dev/null || return
}

# Enters, and checks that the command exists.
prepare() {
  local assignment path
  enter || fail 69 "no folder $folder, in which the command would start"
  unset "${contract[@]}"
  export PYTHONUNBUFFERED=${PYTHONUNBUFFERED-1}       # so that the last lines before a crash are not lost
  path=$PATH
  for assignment in "${added[@]}"; do [[ $assignment != PATH=* ]] || path=${assignment#PATH=}; done
  local name=${command[0]}
  if [[ $name == */* ]]; then
    [[ -e $name ]] || fail 127 "command not found: $name"
    [[ -x $name && ! -d $name ]] || fail 126 "not an executable file: $name"
  else
    (PATH=$path && type -P -- "$name") >/dev/null || fail 127 "command not found: $name (PATH=$path)"
  fi
  [[ -z $gpus_per_process ]] || check_gpus
  [[ -z $log_dir ]] || { mkdir -p -- "$log_dir" && [[ -w $log_dir ]]; } 2>/dev/null || fail 69 "cannot write to --log-dir $log_dir"
  local ledgers=${MPMD_LEDGER_DIR:-$log_dir} # before any rank starts, so these files are from an earlier job
  [[ -z $ledgers ]] || ((attempt > 0)) || (set +f && rm -f -- "$ledgers"/rank-*.ledger) 2>/dev/null
}

check_gpus() {
  local -a visible=()
  local have needed=$(((local_ids[-1] + 1) * gpus_per_process)) from
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
    have=${#visible[@]} from=" (CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES)"
    [[ $transport != slurm ]] || ((have != gpus_per_process)) || return 0
  else
    have=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') from=
    type -P nvidia-smi >/dev/null || have=0
  fi
  ((have >= needed)) || fail 69 "$have GPUs$from, but ${#local_ids[@]} processes with $gpus_per_process each need $needed"
}

# Copies the launcher's commands into the agent's loop. The launcher is gone when stdin ends or, on other hosts, when no
# sign of life comes.
listen() {
  trap '' TERM HUP INT
  trap - EXIT
  exec {life}<&-
  local line limit=
  [[ $transport == local ]] || limit=$silence_s
  while read_line "$commands" "$limit"; do
    [[ $line == alive ]] || event "$line"
  done
  event gone
}

# Outlives the agent, even a killed one. Then kills the remaining processes of the ranks, and removes the work folder.
guard() {
  trap '' TERM HUP INT
  trap - EXIT
  exec {commands}<&- {events}<&-
  exec {watched}<"$work/life" {life}<&-
  local -a pids
  read -r -u "$watched"
  while members; do
    kill -KILL -- "${pids[@]}" 2>/dev/null
    sleep 0.1
  done
  rm -rf "$work"
}

lives() { kill -0 "$1" && [[ $(<"/proc/$1/stat") != *") Z "* ]]; } 2>/dev/null # else a zombie: its parent has not read its status

# Writes the processes of this agent's ranks into the caller's `pids`. False if there are none.
members() {
  local -a found
  mapfile -t found < <(exec 2>/dev/null && set +f && grep -lzxF -- "$mark" /proc/[0-9]*/environ)
  pids=("${found[@]//[!0-9]/}")
  local pid
  for pid in $(exec 2>/dev/null && set +f && cat -- "$work"/pid.*); do # some programs write over their environment
    [[ " ${pids[*]} " == *" $pid "* ]] || ! lives "$pid" || pids+=("-$pid")
  done
  ((${#pids[@]}))
}

handle() { # an event, or a command from the launcher
  local kind=$1
  shift
  case $kind in
    start) start_ranks "$@" ;;
    started) rank_pid[$1]=$2 pumps+=("$3" "$4") ;;
    exited)
      tell exited "$1" "$2" "${rank_pid[$1]}" "$(have_status && echo yes || echo no)" "$(goes_on)" "$(blamed_by "$1")"
      num_running=$((num_running - 1))
      ;;
    flushed) num_open=$((num_open - 1)) ;;
    serving) service_pid=$1 ;;
    service)
      [[ -n $stopping ]] || tell service "$1" "$(tail -n 5 "$work/service.err" | tr '\n' ' ' | cut -c 1-1500)"
      service_pid=
      ;;
    failed) note_failure "$@" ;;
    spares) printf '%s\n' "$*" >"$work/spares" && mv "$work/spares" "$work/status/spares" ;;
    asks) tell goes_on "$(goes_on)" "$1" ;;
    take) take "$@" ;;
    again) start_again "$@" ;;
    signal)
      tell signal "$1"
      stop
      ;;
    stop) stop ;;
    now) hurry=yes ;;
    quit)
      last_lines "$1"
      finished=yes
      ;;
    gone) # also when writing to the launcher fails
      stop
      finished=yes
      ;;
  esac
}

have_status() { (cd "$work/status" && compgen -G "rank-*.json" >/dev/null); }

take() { # pairs of a rank and the process that becomes it; continues this process if it was stopped while it waited
  local process
  local -a pairs=("$@")
  while (($#)); do # the status of the lost process must not be reported any more
    rm -f "$work/status/rank-$1.json"
    for process in "${ranks[@]}"; do
      [[ ${rank_of[process]:-$process} != "$1" ]] || rank_of[process]=-
    done
    rank_of[$2]=$1
    shift 2
  done
  set -- "${pairs[@]}"
  printf '%s %s\n' "$@" >>"$work/status/taken"
  while (($#)); do
    [[ -z ${rank_pid[$2]:-} ]] || kill -CONT "${rank_pid[$2]}" 2>/dev/null
    shift 2
  done
}

goes_on() { # prints "yes" if ranks of this host are in mpmd.resilient, where they continue after a loss
  (set +f && grep -qs '"goes_on": true' "$work"/status/rank-*.json) && echo yes || echo no
}

blamed_by() { # process; prints the rank that its verdict blames, if its watchdog ended the job
  local file=$work/status/rank-${rank_of[$1]:-$1}.json
  [[ -s $file && $(json_value verdict "$(<"$file")") =~ ^jax-mpmd:\ rank\ ([0-9]+): ]] && echo "${BASH_REMATCH[1]}"
}

# Tells the watchdogs of this host which rank failed first, so that they do not have to find it.
note_failure() { # rank status text...
  failed_at=$(date +%s)
  printf '{"rank": %s, "status": %s, "what": "%s"}\n' "$1" "$2" "${*:3}" >"$work/failed.json"
  mv "$work/failed.json" "$work/status/failed.json"
}

start_ranks() { # address, "yes" if the launcher runs the coordination service
  local i
  [[ -z $stopping ]] || return 0
  service_address=$1 served=$2
  for i in "${!ranks[@]}"; do start_rank "${ranks[i]}" "${local_ids[i]}"; done
}

start_rank() { # rank, index on this host
  num_running=$((num_running + 1)) num_open=$((num_open + 1))
  run_rank "$1" "$2" "$service_address" "$served" &
}

# Starts a process on the devices of another one, which may have ended.
start_again() { # the other process, the new one
  local i
  [[ -z $stopping ]] || return 0
  for i in "${!ranks[@]}"; do
    [[ ${ranks[i]} == "$1" ]] || continue
    ranks+=("$2") local_ids+=("${local_ids[i]}")
    start_rank "$2" "${local_ids[i]}"
  done
}

# Runs one rank to its end. Passes its output to the launcher and keeps its last lines.
run_rank() {
  trap '' TERM HUP INT
  trap - EXIT
  exec {commands}<&- {life}<&-
  [[ -z $service_life ]] || exec {service_life}<&-
  local rank=$1 copy out err pid status told=''
  local -a rank_environment
  mkfifo "$work/out.$rank" "$work/err.$rank" "$work/tail.$rank"
  exec {hold}<>"$work/tail.$rank"
  if [[ -n $log_dir ]]; then
    {
      # Appends to the new file, which may be cut off while it grows (logrotate's copytruncate). Where that fails (the
      # disk is full), reads on for a while, so that a rank that prints does not block, and tries again.
      : >"$(log_file "$rank")"
      until cat >>"$(log_file "$rank")"; do
        [[ -n $told ]] || echo "[$rank] jax-mpmd: $(log_file "$rank") cannot be written; tried again every 5s" >&3
        told=yes
        ! timeout 5 cat >/dev/null || break
      done
    } 3>&2 2>/dev/null <"$work/tail.$rank" {hold}<&- {events}<&- &
  else
    tail -n "$num_last_lines" <"$work/tail.$rank" >"$work/last.$rank" {hold}<&- {events}<&- &
  fi
  copy=$!
  pump "$rank" <"$work/out.$rank" {hold}<&- {events}<&- &
  out=$!
  pump "$rank" <"$work/err.$rank" >&2 {hold}<&- {events}<&- &
  err=$!
  set_rank_environment "$rank" "$2" "$3" "$4" "$work/status"
  (
    trap - TERM HUP INT QUIT PIPE
    export "${rank_environment[@]}" "${mark?}"
    # Some names are special in bash (IFS, UID), so the user's variables are not set in this shell.
    exec env "${own_words[@]}" "${added[@]}" "${rank_environment[@]}" "$(type -P setsid)" -- "${command[@]}"
  ) </dev/null >"$work/out.$rank" 2>"$work/err.$rank" {hold}<&- {events}<&- &
  pid=$!
  echo "$pid" >"$work/pid.$rank"
  event started "$rank" "$pid" "$out" "$err"
  wait "$pid" 2>/dev/null
  status=$?
  rm -f -- "$work/pid.$rank"
  event exited "$rank" "$status"
  wait "$out" "$err"
  exec {hold}<&-
  wait "$copy"
  event flushed "$rank"
}

# Prints a stream's lines with their rank in front, one write per line, and copies them without the rank. Long lines are
# broken, and \r ends a line. The last line is ended too: a byte \001 is added at the end of the stream and removed again.
# The lines that gloo prints when processes first meet are left out.
pump() { # rank
  # shellcheck disable=SC2016 # for the inner shell to expand
  exec setsid bash -c '{ stdbuf -oL tr "\r" "\n" | stdbuf -oL fold -b -w "$1"; printf "\001\n"; } | LC_ALL=C exec stdbuf -oL -eL \
    sed -e "/^\x01$/d" -e "s/\x01$//" -e "$4" -e "w /dev/stderr" -e "s/^/[$2] /" 2>"$3"' pump "$line_width" "$1" "$work/tail.$1" \
    '/^\[Gloo] Rank [0-9]* is connected to [0-9]* peer ranks\. Expected number of connected peer ranks is : [0-9]*$/d'
}

log_file() { printf '%s/rank-%s%s.log' "$log_dir" "$1" "$( ((attempt == 0)) || echo ".restart-$attempt")"; }

# Sends TERM, then KILL, until no process with the mark is left. Then reports the status and that it has stopped.
stop() {
  [[ -z $stopping ]] || return 0
  stopping=yes
  local signal deadline line pid
  : >"$work/status/stopping" # tells ranks not to finish their step after this SIGTERM
  local -a pids
  local -A told=()
  for signal in TERM KILL; do
    deadline=$((SECONDS + 1 + term_s))
    while members || ((num_running > 0)) && ((SECONDS < deadline)); do # a rank may be starting right now
      [[ $signal == KILL || -z $hurry ]] || break
      for pid in "${pids[@]}"; do
        [[ $signal == TERM && -n ${told[$pid]:-} ]] || kill -"$signal" -- "$pid"
        told[$pid]=yes
        kill -CONT -- "$pid"
      done 2>/dev/null
      wait_for_event 0.1
    done
  done
  ! members || tell "left $(printf '%s ' "${pids[@]#-}")"
  deadline=$((SECONDS + 1 + term_s))
  while ((num_open > 0 && SECONDS < deadline)); do wait_for_event 0.1; done
  ((num_open <= 0)) || for pid in "${pumps[@]}"; do kill -KILL -- "-$pid" 2>/dev/null; done
  stop_service
  report_status
  tell stopped "$agent_index"
}

wait_for_event() {
  local line
  # shellcheck disable=SC2086 # events are words
  ! read_line "$events" "$1" || handle $line
}

# Reports what each rank was doing, from the file that its watchdog wrote.
report_status() {
  local process rank file text now=${failed_at:-$(date +%s)} waiting seconds doing
  for process in "${ranks[@]}"; do
    rank=${rank_of[process]:-$process}
    file=$work/status/rank-$rank.json
    [[ -s $file ]] || continue
    text=$(tr '\n' ' ' <"$file")
    waiting=
    [[ ! $text =~ \"waiting_for\":\ *(\{[^}]*\}) ]] || waiting=${BASH_REMATCH[1]}
    text=${text/"$waiting"/}
    doing=$(json_value doing "$text")
    seconds=$(json_value since "$text")
    if [[ -n $waiting ]]; then
      [[ $waiting =~ \"ranks\":\ *\[([^]]*)\] ]]
      doing+="${doing:+, }waits for $(json_value value "$waiting") from rank ${BASH_REMATCH[1]:-?}"
      seconds=$(json_value since "$waiting")
    fi
    [[ ! $seconds =~ ^([0-9]+) ]] || seconds=$((now > BASH_REMATCH[1] ? now - BASH_REMATCH[1] : 0))
    tell "$(printf 'doing %s %s %s %s' "$rank" "$(json_value step "$text")" "${seconds:--}" "${doing:--}" | cut -c 1-800)"
    text=$(json_value verdict "$text" | cut -c 1-2000)
    [[ -z $text ]] || tell verdict "$rank" "$text"
  done
}

json_value() { # name, JSON text; prints a string or a number, and nothing for null
  local pattern="\"$1\": *(\"(([^\"\\\\]|\\\\.)*)\"|[-+.0-9eE]+)"
  [[ $2 =~ $pattern ]] || return 0
  local value=${BASH_REMATCH[1]} backslash=\\
  [[ $value != \"* ]] || value=${BASH_REMATCH[2]:-}
  value=${value//"$backslash"\"/\"}
  printf '%s' "${value//"$backslash$backslash"/"$backslash"}"
}

last_lines() {
  local line file=$work/last.$1
  [[ -z $log_dir ]] || file=$(log_file "$1")
  [[ " ${ranks[*]} " == *" $1 "* && -f $file ]] || return 0
  while IFS= read -r line; do tell "last |$line"; done < <(tail -n "$num_last_lines" "$file")
}

# --- the coordination service: a child of the first agent ---------------------------------------------------------------

# Prints a free port, below the range from which the system takes ports for outgoing connections.
choose_port() {
  local port=$wanted_port
  [[ -z $port ]] || { ! listens "$port" && echo "$port"; return; }
  while port=$((20000 + RANDOM % 10000)) && listens "$port"; do :; done
  echo "$port"
}

listens() { # state 0A is LISTEN; columns: number, local address:port, remote, state
  grep -qiE "^ *[0-9]+: [0-9A-F]+:$(printf '%04X' "$1") [0-9A-F:]+ 0A " /proc/net/tcp /proc/net/tcp6 2>/dev/null
}

# Finds the Python in the command, also behind `env` or in the text for `bash -c`, and the folder of its mpmd.
find_mpmd() {
  local word words pythons=()
  read -rd '' -a words <<<"${command[*]}"
  for word in "${command[@]}" "${words[@]}"; do [[ ! ${word##*/} =~ ^python[0-9.]*$ ]] || pythons+=("$word"); done
  for service_python in "${pythons[@]:-python3}"; do
    mpmd_folder=$(env "${added[@]}" "${as_it_is[@]}" "$service_python" -c '
import importlib.util, os, sys
specs = [importlib.util.find_spec(name) for name in ("mpmd", "jax")]
places = list(specs[0].submodule_search_locations or []) if all(specs) else []
print(next(p for p in places if os.path.exists(os.path.join(p, "coordinator.py"))))' 2>/dev/null) && return
  done
  return 1
}

start_service() { # port
  local options=(--bind '[::]')
  [[ $local_only != yes ]] || options=(--bind 127.0.0.1)
  ((restarts == 0)) || options+=(--recoverable)
  mkfifo "$work/service.in" && exec {service_life}<>"$work/service.in"
  {
    trap '' TERM HUP INT
    trap - EXIT
    exec {commands}<&- {life}<&- 2>/dev/null
    (
      trap - TERM HUP INT QUIT PIPE
      exec {service_life}<&- {events}<&-
      exec setsid env "${added[@]}" "${as_it_is[@]}" "$service_python" -m mpmd.coordinator "$1" "$num_ranks" "${options[@]}"
    ) <"$work/service.in" >"$work/service.out" 2>"$work/service.err" &
    exec {service_life}<&-
    event serving $!
    wait $!
    event service $?
  } >/dev/null 2>&1 &
  while [[ -z $service_pid ]]; do wait_for_event 1; done
  # Another job may take a port that the user named, and our ranks would join that job. So wait until our service listens.
  [[ -z $wanted_port ]] || while [[ -n $service_pid && -z $stopping && ! -s $work/service.out ]]; do wait_for_event 0.1; done
}

stop_service() {
  [[ -n $service_pid ]] || return 0
  exec {service_life}<&-
  local signal pid=$service_pid deadline=$((SECONDS + 3))
  for signal in TERM KILL; do
    [[ -z $service_pid ]] || kill -"$signal" "$pid" 2>/dev/null
    while [[ -n $service_pid ]] && ((SECONDS < deadline)); do wait_for_event 0.2; done
  done
}

# --- keepers: a process on each host that keeps states in memory ------------------------------------------------------

# Runs on a host instead of an agent, and becomes the keeper. Its stdin ends with the launcher, and so does the keeper.
keep() {
  local address=:: words=()
  [[ $local_only != yes ]] || address=127.0.0.1
  [[ $transport == local ]] || words=(--silence "$silence_s")
  enter && find_mpmd && [[ -f $mpmd_folder/resilience/keeper.py ]] || exit 69
  export "MPMD_KEEPER_TOKEN=$keeper_token"
  exec env "${added[@]}" "${as_it_is[@]}" "$service_python" "$mpmd_folder/resilience/keeper.py" --bind "$address" "${words[@]}"
}

# Starts a keeper on each host without one, and waits until it listens. Sets keepers (port and name, by host), and
# unreachable (hosts that do not answer).
start_keepers() {
  local name h end word port socket answer_s
  local -A answers=()
  unreachable=()
  ((restarts > 0)) || return 0
  [[ $transport != slurm ]] || find_unreachable_nodes
  for h in "${!host_names[@]}"; do
    name=${host_names[h]}
    [[ " ${unreachable[*]} " != *" $name "* ]] || continue
    [[ ${lost_host:-} != "$name" || $transport == slurm ]] || end_keeper "$name"
    [[ -z ${keepers[$name]:-} ]] || ! keeper_lives "$name" || continue
    answer_s=10
    [[ -z ${keepers[$name]:-} ]] || { # its host has answered before, so wait less
      answer_s=5 && say "starts a new keeper on $name: what lay in the memory of the last one is lost"
    }
    unset "keepers[$name]"
    start_keeper "$h"
    answers[$name]=$answer
  done
  end=$((SECONDS + keeper_s))
  for name in "${!answers[@]}"; do
    answer=${answers[$name]}
    while [[ -z ${keepers[$name]:-} && -z $interrupted ]] && ((SECONDS < end)) && keeper_lives "$name"; do
      ! read -r -t 0.2 -u "$answer" word port socket || [[ ! "$word $port" =~ ^ready\ [0-9]+$ ]] || # else a greeting of the shell there
        keepers[$name]=$port:$socket
    done
    exec {answer}<&-
    [[ -z ${keepers[$name]:-} ]] || { disown "${keeper_pids[$name]}" && continue; } # else bash would print how it ended
    end_keeper "$name"
    case $transport:$? in
      ssh:255 | ssh:137) is_here "$name" || unreachable+=("$name") ;; # refused, or no answer in time
      slurm:69) ;; # no mpmd there
      slurm:*) say "no keeper on $name, so its ranks keep nothing: $(tail -n 1 "$keep_folder/err.$name")" ;;
    esac
  done
  [[ -z ${keep_folder:-} ]] || rm -rf "$keep_folder"
}

keeper_lives() { kill -0 "${keeper_pids[$1]}" 2>/dev/null; } # host

end_keeper() { # host; returns the status of a keeper that ended before it listened
  local status
  kill -KILL "${keeper_pids[$1]:-}"
  wait "${keeper_pids[$1]:-}"
  status=$?
  while keeper_lives "$1"; do sleep 0.05; done
  return "$status"
} 2>/dev/null # messages of bash about a killed process

# Starts a keeper. Sets answer, the file descriptor of its output.
start_keeper() { # host
  local h=$1 name=${host_names[$1]} fd
  local -a agent_command
  [[ -d ${keep_folder:-} ]] || keep_folder=$(mktemp -d "${TMPDIR:-/tmp}/jax-mpmd.XXXXXX") ||
    die 69 "no temporary folder in ${TMPDIR:-/tmp}"
  mkfifo "$keep_folder/life.$h" "$keep_folder/in.$h" "$keep_folder/out.$h"
  [[ -z ${keeper_fds[$name]:-} ]] || { fd=${keeper_fds[$name]} && exec {fd}>&-; }
  exec {fd}<>"$keep_folder/life.$h" {answer}<>"$keep_folder/out.$h"
  keeper_fds[$name]=$fd
  set_agent_command "$h" keeper
  feed_keeper "$h" >"$keep_folder/in.$h" 2>/dev/null &
  (
    close_keeper_fds
    exec {answer}<&-
    trap - TERM HUP INT QUIT PIPE
    ask_for_nothing
    exec setsid "${agent_command[@]}"
  ) <"$keep_folder/in.$h" >"$keep_folder/out.$h" 2>"$keep_folder/err.$name" &
  keeper_pids[$name]=$!
}

# Unsets the requests of the allocation: they are meant for the ranks, and srun would request the same for a keeper.
ask_for_nothing() {
  unset "${!SLURM_GPU@}" "${!SLURM_GRES@}" "${!SLURM_NTASKS@}" "${!SLURM_MEM@}" "${!SLURM_TRES@}" "${!SLURM_CPUS@}"
}

# Adds nodes to unreachable if their agents have not reported that they stopped, and if no step can be started there.
find_unreachable_nodes() {
  local task h name
  local -a agent_command
  local -A silent=() probes=()
  for task in "${!host_of[@]}"; do [[ -n ${has_stopped[task]:-} ]] || silent[${host_of[task]}]=yes; done
  for name in "${!away[@]}"; do silent[$name]=yes; done
  for h in "${!host_names[@]}"; do
    name=${host_names[h]}
    [[ -n ${silent[$name]:-} ]] || continue
    set_agent_command "$h" keeper
    (ask_for_nothing && exec timeout -k 1 "$keeper_s" "${agent_command[@]::${#agent_command[@]}-4}" true) </dev/null &>/dev/null &
    probes[$name]=$!
  done
  for name in "${!probes[@]}"; do
    ! wait "${probes[$name]}" || continue
    unreachable+=("$name")
    [[ -z ${keeper_pids[$name]:-} ]] || end_keeper "$name"
  done
}

# Writes a keeper's program, and then signs of life until the launcher is gone.
feed_keeper() { # host
  trap '' TERM HUP INT
  trap - PIPE EXIT
  exec {watched}<"$keep_folder/life.$1" {answer}<&-
  close_keeper_fds
  agent_program "$1"
  printf '\0'
  while read -r -t "$beat_s" -u "$watched" _ || (($? > 128)); do echo alive; done
  lives "$$" || rm -rf "$keep_folder"
}

close_keeper_fds() {
  local fd
  for fd in "${keeper_fds[@]}"; do exec {fd}>&-; done
}

stop_keepers() {
  local name end=$((SECONDS + 3))
  close_keeper_fds
  for name in "${!keeper_pids[@]}"; do
    while keeper_lives "$name" && ((SECONDS < end)); do sleep 0.05; done
    kill -KILL "${keeper_pids[$name]}" 2>/dev/null
  done
  # A killed keeper of this host has left its folder of compiled programs.
  rm -rf "${TMPDIR:-/tmp}/jax-mpmd.$(printf %s "$keeper_token" | sha256sum | cut -c 1-16)"
  [[ -z ${keep_folder:-} ]] || rm -rf "$keep_folder"
}

# Plans all hosts again, also those that did not answer, without unfit devices.
plan_again() {
  local h
  local -a words
  lost_host=${lost:+${host_names[${lost%% *}]}}
  host_names=("${all_names[@]}") host_counts=("${all_counts[@]}") num_ranks=$all_ranks
  for h in "${!host_names[@]}"; do
    read -ra words <<<"${left_out[${host_names[h]}]:-}"
    host_counts[h]=$((host_counts[h] - ${#words[@]}))
    ((host_counts[h] > 0)) || unset "host_names[h]" "host_counts[h]"
  done
  host_names=("${host_names[@]}") host_counts=("${host_counts[@]}")
  number_ranks
}

# Leaves out hosts that do not answer any more, if enough others are left, or if spares make up for their processes.
leave_out_unreachable() {
  local name h left=0
  local -a names=() counts=()
  for name in "${!away[@]}"; do
    [[ " ${unreachable[*]} " == *" $name "* ]] || { say "host $name answers again, and takes part" && unset "away[$name]"; }
  done
  ((${#unreachable[@]})) || return 0
  for h in "${!host_names[@]}"; do
    [[ " ${unreachable[*]} " == *" ${host_names[h]} "* ]] || left=$((left + host_counts[h]))
  done
  ((${#host_names[@]} - ${#unreachable[@]} >= min_hosts || left >= num_ranks)) || return 0
  for h in "${!host_names[@]}"; do
    name=${host_names[h]}
    if [[ " ${unreachable[*]} " == *" $name "* ]]; then
      say "goes on without host $name, which does not answer"
      away[$name]=yes
    else
      names+=("$name") counts+=("${host_counts[h]}")
    fi
  done
  host_names=("${names[@]}") host_counts=("${counts[@]}")
  number_ranks
}

# Leaves out devices that are slow or compute wrong, as long as all ranks have other devices.
leave_out_unfit() {
  local h i name again
  for h in "${!host_names[@]}"; do
    name=${host_names[h]} again=
    for i in ${unfit[$name]:-}; do
      if ((num_processes > num_ranks)); then
        say "goes on without the devices of process $i on $name, which are unfit"
        host_counts[h]=$((host_counts[h] - 1)) num_processes=$((num_processes - 1))
        left_out[$name]+=" $i"
      else
        again+=" $i"
        say "uses the devices of process $i on $name again, which are unfit: no others are left"
      fi
    done
    unfit[$name]=$again
  done
  for h in "${!host_names[@]}"; do ((host_counts[h] > 0)) || unset "host_names[h]" "host_counts[h]"; done
  host_names=("${host_names[@]}") host_counts=("${host_counts[@]}")
  number_ranks
}

# --- the launcher ---------------------------------------------------------------------------------------------------

parse() {
  procs_per_host='' hosts='' cpu_devices='' gpus_per_process='' wanted_port='' hang_timeout_s='' restarts=0 min_hosts='' num_spares=0
  replace_slow='' log_dir='' dry_run='' ssh=${MPMD_SSH:-ssh} added=() command=()
  local name value
  while (($#)); do
    name=$1
    shift
    case $name in
      -h | --help) usage && exit 0 ;;
      --dry-run) dry_run=yes && continue ;;
      --) command=("$@") && break ;;
      --*=*) value=${name#*=} name=${name%%=*} ;;
      -n | -H | --procs-per-host | --hosts | --cpu-devices | --gpus-per-process | --port | --hang-timeout | --restarts | --min-hosts | --spares | --replace-slow | --log-dir | --ssh | --env)
        (($#)) && [[ $1 != -- ]] || option_error "$name needs a value"
        value=$1
        shift
        ;;
      -*) option_error "unknown option $name" ;;
      *) option_error "'$name' is not an option; the command goes after --" ;;
    esac
    [[ -n ${value//[[:space:]]/} ]] || option_error "$name: the value is empty"
    case $name in
      -n | --procs-per-host) check_number "$name" "$value" 1 && procs_per_host=$value ;;
      -H | --hosts) hosts=$value ;;
      --cpu-devices) check_number "$name" "$value" 1 && cpu_devices=$value ;;
      --gpus-per-process) check_number "$name" "$value" 1 && gpus_per_process=$value ;;
      --port) check_number "$name" "$value" 1 65535 && wanted_port=$value ;;
      --hang-timeout)
        [[ $value =~ ^[0-9]{1,9}(\.[0-9]+)?$ ]] || option_error "--hang-timeout: '$value' is not a number of seconds"
        hang_timeout_s=$value
        ;;
      --restarts) check_number "$name" "$value" 0 && restarts=$value ;;
      --min-hosts) check_number "$name" "$value" 1 && min_hosts=$value ;;
      --spares) check_number "$name" "$value" 0 && num_spares=$value ;;
      --replace-slow)
        [[ $value =~ ^(1\.0*[1-9][0-9]*|([2-9]|[1-9][0-9]{1,8})(\.[0-9]+)?)$ ]] ||
          option_error "--replace-slow: '$value' is not a number above 1"
        replace_slow=$value
        ;;
      --log-dir) log_dir=$value ;;
      --ssh) ssh=$value ;;
      --env)
        [[ $value =~ ^[A-Za-z_][A-Za-z_0-9]*(=.*)?$ ]] || option_error "--env: '$value' is neither NAME nor NAME=VALUE"
        [[ " ${contract[*]} " != *" ${value%%=*} "* ]] || option_error "--env: ${value%%=*} is set by the launcher"
        if [[ $value != *=* ]]; then
          value=$(from_environment "$value") || option_error "--env: $value is not set in this environment"
          value=${value%x}
        fi
        added+=("$value")
        ;;
      *) option_error "unknown option $name" ;;
    esac
  done
  ((${#command[@]})) || option_error "no command; it goes after --"
  [[ -z $cpu_devices || -z $gpus_per_process ]] || option_error "--cpu-devices and --gpus-per-process cannot be used together"
  [[ -z $replace_slow ]] || ((num_spares > 0)) || option_error "--replace-slow needs --spares, one of which takes the place"
  ((num_spares == 0 || restarts > 0)) || option_error "--spares needs --restarts, which has states kept in memory"
  [[ $log_dir != *$'\n'* ]] || option_error "--log-dir: a newline in the name"
  [[ $ssh != *$'\n'* ]] || option_error "--ssh: a newline in the command"
}

check_number() { # option, value, smallest, largest
  local range="of at least $3"
  [[ -z ${4:-} ]] || range="from $3 to $4"
  # Bash and others would read a number with leading zeros as octal.
  [[ ! $2 =~ ^0[0-9]+$ ]] || option_error "$1: '$2' has leading zeros"
  [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] && (($2 >= $3 && $2 <= ${4:-$2})) ||
    option_error "$1: '$2' is not a whole number $range"
  (($2 <= ${4:-$most})) || option_error "$1: $2 is more than $most"
}

# Prints NAME=VALUE from the environment of this process. For some names (IFS, UID, lower case) bash has another value.
from_environment() { # name; an x is added at the end, so that $(...) keeps newlines
  local entry
  while IFS= read -r -d '' entry; do
    [[ $entry != "$1="* ]] || { printf '%sx' "$entry" && return; }
  done </proc/$$/environ
  printf '%s' "$1"
  return 1
}

# Determines which rank runs where: host_names (in the form for ssh; under Slurm the nodes), host_counts and first_ranks.
plan() {
  transport=ssh
  host_names=() host_counts=() first_ranks=() num_processes=0
  local step=${SLURM_STEP_ID:-none} entry name count
  local -A seen=()
  if [[ -z $hosts ]]; then
    # A batch script is in no step. An interactive salloc shell is in a special step, from which srun works too.
    if [[ -n ${SLURM_JOB_ID:-} ]] && type -P srun >/dev/null && [[ $step == none || $step == 4294967290 ]]; then
      transport=slurm
      num_nodes=${SLURM_JOB_NUM_NODES:-1}
      check_number SLURM_JOB_NUM_NODES "$num_nodes" 1
      count=${procs_per_host:-${SLURM_NTASKS_PER_NODE:-}}
      if [[ -z $count && -n ${SLURM_NTASKS:-} && ${SLURM_TASKS_PER_NODE:-} =~ ^([0-9]+)(\(x[0-9]+\))?$ ]]; then
        count=${BASH_REMATCH[1]}
      fi
      procs_per_host=${count:-1} count=${count:-1}
      check_number SLURM_NTASKS_PER_NODE "$count" 1
      ((num_spares < num_nodes * count)) || option_error "--spares: $num_spares of $((num_nodes * count)) tasks leave none for ranks"
      num_ranks=$((num_nodes * count - num_spares))
      mapfile -t host_names < <(scontrol show hostnames "${SLURM_JOB_NODELIST:-}")
      ((${#host_names[@]} == num_nodes)) ||
        die 69 "scontrol names ${#host_names[@]} nodes in SLURM_JOB_NODELIST='${SLURM_JOB_NODELIST:-}', not SLURM_JOB_NUM_NODES=$num_nodes"
      for name in "${host_names[@]}"; do host_counts+=("$count"); done
      check_min_hosts
      number_ranks
      return
    fi
    hosts=localhost
  fi
  [[ $hosts != *[[:space:]]* && $hosts != ,* && $hosts != *, && $hosts != *,,* ]] ||
    option_error "--hosts: '$hosts' is not a list of hosts separated by commas"
  local -a entries
  IFS=, read -ra entries <<<"$hosts"
  for entry in "${entries[@]}"; do
    name=$entry count=${procs_per_host:-1}
    if [[ ! $entry =~ ^(.*@)?\[[^]]*\]$ && $entry =~ ^(.*[^:]|\[.*\]):([^:]*)$ ]]; then # not inside an IPv6 address
      name=${BASH_REMATCH[1]} count=${BASH_REMATCH[2]}
      [[ $name != *:* || $name == *]* ]] || option_error "--hosts: '$entry': write an IPv6 address in brackets"
      check_number "--hosts: $name" "$count" $((num_spares == 0))
    fi
    [[ $name =~ ^[][A-Za-z0-9_.@:%-]+$ && ! $name =~ ^(-|@|:$|:[^:]) ]] || option_error "--hosts: '$name' is not the name of a host"
    [[ ! $name =~ ^(.*@)?\[(.+)\]$ ]] || name=${BASH_REMATCH[1]}${BASH_REMATCH[2]} # the form for ssh
    [[ -z ${seen[$name]:-} ]] || option_error "--hosts: $name is named twice; write $name:K for K processes"
    seen[$name]=yes
    host_names+=("$name") host_counts+=("$count")
  done
  check_min_hosts
  add_spares
  number_ranks
  [[ -z $dry_run ]] || return 0
  read -r entry _ <<<"$ssh"
  for name in "${host_names[@]}"; do
    is_here "$name" || type -P -- "$entry" >/dev/null || option_error "--ssh: command not found: $entry"
  done
}

check_min_hosts() {
  min_hosts=${min_hosts:-${#host_names[@]}}
  ((min_hosts <= ${#host_names[@]})) || option_error "--min-hosts: $min_hosts is more than ${#host_names[@]} hosts"
}

# Sets num_ranks, and adds the spares to host_counts.
add_spares() {
  local h i
  local -a empty=()
  num_ranks=0
  for h in "${!host_counts[@]}"; do
    num_ranks=$((num_ranks + host_counts[h]))
    ((host_counts[h] > 0)) || empty+=("$h")
  done
  ((num_ranks > 0)) || option_error "--hosts: no host has a process that is not a spare"
  ((${#empty[@]} <= num_spares)) || option_error "--spares: $num_spares for ${#empty[@]} hosts without other processes"
  ((${#empty[@]} > 0)) || empty=("$h")
  for ((i = 0; i < num_spares; i++)); do
    h=${empty[i * ${#empty[@]} / num_spares]}
    host_counts[h]=$((host_counts[h] + 1))
  done
}

# Numbers the processes host by host. Processes from num_ranks on are spares. With fewer hosts there are fewer spares, and
# then fewer ranks. Also sets connections, the hosts with an agent of their own; under Slurm one stands for the whole step.
number_ranks() {
  local h i
  first_ranks=() num_processes=0 connections=("${!host_names[@]}") local_of=()
  [[ $transport != slurm ]] || connections=(0)
  for h in "${!host_names[@]}"; do
    first_ranks+=("$num_processes")
    for ((i = 0; num_processes < first_ranks[h] + host_counts[h]; i++)); do
      [[ " ${left_out[${host_names[h]}]:-} " == *" $i "* ]] || { local_of[num_processes]=$i && num_processes=$((num_processes + 1)); }
    done
  done
  ((num_ranks <= num_processes)) || num_ranks=$num_processes
  ((${#host_names[@]} > 1)) && local_only=no || local_only=yes
  ((num_processes > 1)) && serve=yes || serve=no
}

is_here() { [[ $transport != slurm && ($1 == localhost || $1 == 127.0.0.1) ]]; }

# Prints the agent's program: its variables as bash text, and then this script.
agent_program() { # host
  local h=$1 i agent_index=$1
  local -a ranks=() local_ids=() environment=("${own_words[@]}")
  local keeper=${keepers[${host_names[h]}]:-}
  [[ $transport == slurm ]] || for ((i = 0; i < host_counts[h]; i++)); do
    ranks+=("$((first_ranks[h] + i))") local_ids+=("${local_of[first_ranks[h] + i]}")
  done
  if [[ $transport == ssh ]]; then
    local transport=ssh name
    if is_here "${host_names[h]}"; then
      transport=local
    else
      environment=()
      while IFS= read -r name; do
        [[ ! $name =~ $forwarded ]] || environment+=("$name=${!name}")
      done < <(compgen -e)
    fi
  fi
  printf '%s\n' "$set_aside"
  declare -p command environment added ranks local_ids num_processes num_ranks restarts cpu_devices gpus_per_process hang_timeout_s \
    replace_slow wanted_port local_only transport agent_index job attempt serve folder line_width log_dir keeper keepers \
    keeper_token
  printf '%s' "$script_text"
}

# Sets agent_command, the command that runs an agent. The agent reads its program from stdin.
# shellcheck disable=SC2016 # for the other shell to expand
readonly bootstrap='IFS= read -r -d "" program && eval "$program"'
set_agent_command() { # host, role (default: agent)
  local name=${host_names[$1]} what=jax-mpmd-${2:-agent}
  local -a words
  if [[ $transport == slurm ]]; then
    read -ra words <<<"${MPMD_SRUN:-srun}"
    if [[ $what == jax-mpmd-keeper ]]; then # a separate step, which outlives the ranks' step and takes no resources from it
      agent_command=("${words[@]}" --overlap --nodes=1 --ntasks=1 "--nodelist=$name" --gres=none --mem=0 --cpu-bind=none
        --input=all)
    else
      agent_command=("${words[@]}" --kill-on-bad-exit=1 "--nodes=${#host_names[@]}" "--ntasks=$num_processes"
        "--ntasks-per-node=$procs_per_host" --distribution=block --input=all)
      [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || agent_command+=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
      # For some time, Slurm believes that a step with a lost node still runs.
      ((${#host_names[@]} == num_nodes)) || agent_command+=(--overlap "--nodelist=$(IFS=, && printf '%s' "${host_names[*]}")")
    fi
    agent_command+=(bash -c "$bootstrap" "$what")
  elif is_here "$name"; then
    agent_command=(bash -c "$bootstrap" "$what")
  else
    read -ra words <<<"$ssh"
    agent_command=("${words[@]}" -T -o BatchMode=yes -o "ConnectTimeout=${answer_s:-10}" -o ServerAliveInterval=3
      -o ServerAliveCountMax=3 "$name" "exec bash -c '$bootstrap' $what")
  fi
}

# Prints the name by which other hosts reach the first one.
first_address() { # the first agent's own host name
  local name=${host_names[0]} line
  local -a words
  [[ $local_only != yes ]] || { echo 127.0.0.1 && return; }
  if [[ $transport == slurm ]] || is_here "$name"; then
    name=$1
  else
    read -ra words <<<"$ssh" # other hosts do not know the aliases of this ssh configuration
    line=$("${words[@]}" -G "$name" 2>/dev/null | sed -n 's/^hostname //p')
    name=${line:-${name#*@}}
  fi
  [[ $name != *:* || $name == \[* ]] || name="[$name]"
  printf '%s' "$name"
}

print_dry_run() {
  local h rank i name address
  local recoverable=''
  local -a rank_environment agent_command
  ((restarts == 0)) || recoverable=' --recoverable'
  address=$(first_address "$(hostname)"):${wanted_port:-PORT}
  if [[ $transport == slurm ]]; then
    [[ $local_only == yes ]] || address=${host_names[0]}:${wanted_port:-PORT}
    set_agent_command 0
    printf 'tasks: %s\n' "$(command_line "${agent_command[@]::${#agent_command[@]}-4}" | sed 's/ $//')"
  fi
  [[ $serve == no ]] || printf 'coordination service on %s: %s\n' "${host_names[0]}" \
    "python -m mpmd.coordinator ${wanted_port:-PORT} $num_ranks$recoverable, where mpmd can be imported; else in rank 0"
  for h in "${!host_names[@]}"; do
    for ((i = 0; i < host_counts[h]; i++)); do
      rank=$((first_ranks[h] + i)) name=${host_names[h]}
      set_rank_environment "$rank" "${local_of[rank]}" "$address" "$serve" DIR
      printf '[%s] %s: %s&& %s\n' "$rank" "$name" "$(command_line cd "$folder")" \
        "$(command_line "${added[@]}" "${rank_environment[@]}" "${command[@]}")"
    done
  done | sed 's/ $//'
}

# Writes an agent's program, then its commands with signs of life between them, until the launcher is gone.
feed() { # host
  trap '' TERM HUP INT
  trap - PIPE EXIT
  exec {events}<&- {lines}<"$tmp/command.$1" # does not wait for a writer, because this process is still one
  local fd line
  for fd in "${command_fds[@]}"; do exec {fd}>&-; done
  agent_program "$1"
  printf '\0'
  while true; do
    if read_line "$lines" "$beat_s"; then
      printf '%s\n' "$line"
    elif (($? > 128)); then
      echo alive
    else
      break
    fi
  done
}

# Copies an agent's stdout to the launcher's stdout, in whole lines.
pass_output() {
  trap '' TERM HUP INT
  trap - PIPE EXIT
  exec {events}<&-
  LC_ALL=C exec stdbuf -oL sed ''
}

# Sorts an agent's stderr: the ranks' lines go to our stderr, all others (also ssh's) into the launcher's loop.
sort_errors() { # host
  trap '' TERM HUP INT
  trap - PIPE EXIT
  exec {events}<&-
  # The last process prints. Where nobody reads our stderr any more, it fails and the rest is dropped, but not the messages.
  LC_ALL=C stdbuf -oL -eL sed -n -e '/^\[[0-9]*\] /{w /dev/stderr' -e 'd}' \
    -e 's/^@C //;t ours' -e 's/^/transport /' -e ':ours' -e "s/^/$1 /p" 2>&1 >"$tmp/events" |
    { LC_ALL=C stdbuf -oL sed '' >&2; exec cat >/dev/null; }
}

# Runs one host's agent from start to end. Tells the launcher's loop when all output of the agent has been passed on.
connect() { # host
  trap '' TERM HUP INT
  trap - PIPE EXIT
  close_keeper_fds
  local h=$1 fd sorter
  local -a agent_command status
  set_agent_command "$h"
  mkfifo "$tmp/stdin.$h" "$tmp/stderr.$h"
  feed "$h" >"$tmp/stdin.$h" &
  for fd in "${command_fds[@]}"; do exec {fd}>&-; done
  sort_errors "$h" <"$tmp/stderr.$h" &
  sorter=$!
  (
    printf '%s\n' "$h pid $BASHPID" >&"$events"
    exec {events}<&-
    ! is_here "${host_names[h]}" || trap - TERM HUP INT QUIT # ssh and srun ignore signals: only the launcher gets them
    exec setsid "${agent_command[@]}"
  ) <"$tmp/stdin.$h" 2>"$tmp/stderr.$h" | pass_output
  status=("${PIPESTATUS[@]}")
  wait "$sorter"
  printf '%s\n' "$h closed ${status[0]}" >&"$events"
  lives "$$" || rm -rf "$tmp"
}

command_all() { # sends a line to every agent that is still connected
  local h
  for h in "${!command_fds[@]}"; do printf '%s\n' "$*" >&"${command_fds[h]}"; done 2>/dev/null
}

ended_text() { # prints an exit status in words
  local name
  (($1 != unfit_status)) || { echo 'killed, because its devices are unfit' && return; }
  (($1 > 128)) && name=$(kill -l $(($1 - 128)) 2>/dev/null) && [[ -n $name ]] && echo "killed by SIG$name" || echo "exit status $1"
}

# Makes one attempt, from the start of the agents until all have ended. Sets job_status and job_text (the first line of the
# summary).
run_job() {
  tmp=$(mktemp -d "${TMPDIR:-/tmp}/jax-mpmd.XXXXXX") || die 69 "no temporary folder in ${TMPDIR:-/tmp}"
  mkfifo "$tmp/events" && exec {events}<>"$tmp/events"
  job=$(printf '%s-%s-%04x%04x' "$$" "$attempt" "$RANDOM" "$RANDOM")
  command_fds=() transport_pid=() agent_host=() statuses=() rank_pids=() doing=() verdicts=() host_of=() left=() transport_text=() unread=''
  first_failure='' service_failure='' job_error='' signalled='' lost='' blamed=''
  is_rank=() spares=() num_numbers=$num_processes runs_on=() born=() num_brief=0 unanswered=() unanswered_exits=() question=0 num_no=0
  for ((h = num_ranks; h < num_processes; h++)); do spares+=("$h"); done
  phase=connecting num_ready=() num_stopped=() has_stopped=() num_exited=0 guilty='' job_status=0 job_text=''
  deadline=$((SECONDS + connect_s))
  [[ $transport != slurm ]] || deadline=
  local h fd line kind rest started=$SECONDS
  for h in "${connections[@]}"; do
    mkfifo "$tmp/command.$h"
    exec {fd}<>"$tmp/command.$h"
    command_fds[h]=$fd
    connect "$h" &
  done
  num_open=${#connections[@]}
  [[ -z $interrupted ]] || begin_stop
  while ((num_open > 0)); do
    if read_line "$events" 1; then
      read -r h kind rest <<<"$line"
      on_message "$h" "$kind" "$rest"
    elif [[ -n $deadline ]] && ((SECONDS >= deadline)); then
      on_deadline
    fi
  done
  conclude $((SECONDS - started))
  exec {events}<&-
  events=2
  rm -rf "$tmp"
}

on_message() { # host, kind, text
  local h=$1 kind=$2 text=$3
  # shellcheck disable=SC2086 # most messages are words
  set -- $3
  case $kind in
    pid) transport_pid[h]=$1 ;;
    ready) on_ready "$h" "$@" ;;
    error)
      [[ -n $job_error ]] || { error_status=$1 && job_error="$(place "$h")${text#* }"; }
      begin_stop
      ;;
    exited) on_exit "$@" ;;
    service)
      [[ $phase == stopping ]] || service_failure="$1 $(ended_text "$1")${2:+: ${text#* }}"
      [[ $phase != running ]] || begin_grace yes
      [[ $phase != connecting ]] || begin_stop
      ;;
    signal)
      [[ $phase == stopping ]] || signalled="$1 on ${agent_host[h]:-$(connection_name "$h")}"
      begin_stop
      ;;
    launcher_signal)
      [[ $phase != stopping ]] || command_all now
      interrupted=$1
      begin_stop
      ;;
    goes_on) (($2 != question)) || on_answer "$1" ;;
    doing) doing[$1]=${text#* } ;;
    verdict) verdicts[$1]=${text#* } ;;
    left) left+=("$(connection_name "$h"): $*") ;;
    stopped)
      num_stopped[h]=$((${num_stopped[h]:-0} + 1)) has_stopped[$1]=yes
      ! all_stopped || begin_quit
      ;;
    last) printf '%s\n' "${text#|}" >>"$tmp/last" ;;
    transport)
      [[ ${transport_text[h]:-} == *': Node failure on '* ]] || transport_text[h]=${text%$'\r'} # Slurm prints more after this line
      [[ $transport != slurm ]] || printf '%s\n' "$text" >&2
      ;;
    closed) on_closed "$h" "$1" ;;
  esac
}

connection_name() { [[ $transport == slurm ]] && echo srun || echo "${host_names[$1]}"; }

place() { # prints the origin of a message, unless it is clear
  [[ $transport != slurm ]] || { echo 'srun: ' && return; }
  is_here "${host_names[$1]}" && ((${#host_names[@]} == 1)) || printf 'host %s: ' "${host_names[$1]}"
}

on_ready() { # host, agent, its host name, port, service
  local rank
  if [[ $transport == slurm ]]; then
    host_of[$2]=$3
  else
    for ((rank = first_ranks[$1]; rank < first_ranks[$1] + host_counts[$1]; rank++)); do
      host_of[rank]=$3 runs_on[rank]=$1
    done
  fi
  agent_host[$1]=$3 transport_text[$1]= # earlier text (from the start of the shell there) does not explain a later end
  if (($2 == 0)); then
    address=$(first_address "$3"):$4 served=${5:-no}
  fi
  num_ready[$1]=$((${num_ready[$1]:-0} + 1))
  [[ $phase == connecting ]] && ((${#host_of[@]} == num_processes)) || return 0
  phase=running deadline=
  command_all "start $address $served"
  command_all "spares ${spares[*]}"
}

# "Whether the others continue" is "no" if no rank of the same agent does, and "none" if no rank does.
on_exit() { # process, status, pid, whether a watchdog runs, whether the others continue, the rank that it blames
  local rank=${is_rank[$1]:-$1} host=${runs_on[$1]:-} text
  if (($2 > 128 && rank < num_ranks && restarts > 0 && $(num_agents) > 1)) && [[ $phase == running && $5 == no ]]; then
    # Its agent has no rank in mpmd.resilient (any more, or not yet), but others may have.
    unanswered_exits[$1]="$1 $2 $3 $4 ${6:-}"
    ask
    return 0
  fi
  unset "runs_on[$1]"
  (($2 != unfit_status)) || [[ -z $host ]] || unfit[${host_names[host]}]+=" ${local_of[$1]}"
  if ((rank >= num_ranks)); then
    text="spare $1: $(ended_text "$2")"
    for rank in "${!spares[@]}"; do [[ ${spares[rank]} != "$1" ]] || unset "spares[rank]"; done
    spares=("${spares[@]}")
    # A spare that dies soon may do so each time, so the third one in a row has no successor.
    ((SECONDS - ${born[$1]:-$started} < 60)) && num_brief=$((num_brief + 1)) || num_brief=0
    if (($2 > 128 && $2 != 143 && num_brief < most_alike)) && [[ $phase == running ]]; then
      text+="; spare $num_numbers waits in its place"
      start_spare "$1" "$host"
    fi
    [[ $phase == stopping || $phase == quitting ]] || say "$text"
    command_all "spares ${spares[*]}"
    return 0
  fi
  if (($2 > 128)) && [[ $phase == running && $5 == yes ]] && replace "$rank" "$1" "$2" "$host"; then
    return 0
  fi
  statuses[rank]=$2 rank_pids[rank]=$3
  num_exited=$((num_exited + 1))
  [[ $phase != stopping ]] || return 0
  order+=("$rank")
  if (($2 != 0)) && [[ -z $first_failure ]]; then
    first_failure=$rank
    command_all "failed $rank $2 $(ended_text "$2")"
    begin_grace "$4"
  fi
  blamed=${6:-$blamed}
  ((num_exited < num_ranks)) || begin_stop
  # All ranks have ended, except the rank that they blame. It hangs, or is about to end with its own status.
  [[ -z $blamed || $phase == stopping ]] || ((num_exited < num_ranks - 1)) || [[ -n ${statuses[blamed]:-} ]] ||
    deadline=$((deadline < SECONDS + let_go_s ? deadline : SECONDS + let_go_s))
}

# Replaces a rank by a spare, and starts a new spare where the process of the rank was. If no other spare waits, the new one
# becomes the rank. False if no spare waits and the devices of the process are unfit.
replace() { # rank, its process, status, the index of its host
  local spare text='takes its place'
  ((${#spares[@]} > 0)) || text='is started in its place'
  (($3 == unfit_status)) || start_spare "$2" "$4"
  ((${#spares[@]} > 0)) || return 1
  spare=${spares[0]} spares=("${spares[@]:1}")
  is_rank[spare]=$1
  say "rank $1: $(ended_text "$3"); spare $spare $text"
  command_all "take $1 $spare"
  command_all "spares ${spares[*]}"
}

# Starts a spare on the devices of another process, which may have ended.
start_spare() { # the process, the index of its host
  local new=$num_numbers
  num_numbers=$((new + 1))
  spares+=("$new")
  host_of[new]=${host_of[$1]:-} local_of[new]=${local_of[$1]:-} born[new]=$SECONDS
  [[ -z $2 ]] || runs_on[new]=$2
  command_all "again $1 $new"
}

# Replaces all ranks of a lost host (never the one of the coordination service) by spares on other hosts. If there are too few
# spares, starts processes that share devices of the other hosts, unless fewer than --min-hosts are left. False if that is not
# possible. The ranks of the lost host end when they hear nothing from the others, or when they hear that they are replaced.
replace_host() { # index of the host, why it is lost, "yes" if its ranks are in mpmd.resilient
  local process spare text i=0 beside_it
  local -a lost_processes=() places=() beside=()
  for process in "${!runs_on[@]}"; do
    ((runs_on[process] == $1)) || { beside+=("$process") && continue; }
    unset "runs_on[process]" "unanswered_exits[process]"
    ((${is_rank[process]:-$process} >= num_ranks)) || { lost_processes+=("$process") && continue; }
    for spare in "${!spares[@]}"; do [[ ${spares[spare]} != "$process" ]] || unset "spares[spare]"; done
  done
  spares=("${spares[@]}")
  ((${#lost_processes[@]} == 0)) || [[ $3 == yes ]] || return 1
  if ((${#spares[@]} < ${#lost_processes[@]})); then
    ((${#command_fds[@]} >= min_hosts && ${#beside[@]} > 0)) || return 1
    say "starts $((${#lost_processes[@]} - ${#spares[@]})) processes on the other hosts"
  fi
  for process in "${lost_processes[@]}"; do
    if ((${#spares[@]} == 0)); then
      beside_it=${beside[i++ % ${#beside[@]}]}
      start_spare "$beside_it" "${runs_on[beside_it]}"
    fi
    spare=${spares[0]} spares=("${spares[@]:1}")
    is_rank[spare]=${is_rank[$process]:-$process} text+="; spare $spare takes the place of rank ${is_rank[spare]}"
    places+=("${is_rank[spare]}" "$spare")
  done
  say "host ${host_names[$1]} was lost (${2%.})$text"
  end_keeper "${host_names[$1]}"
  ((${#places[@]} == 0)) || command_all "take ${places[*]}"
  command_all "spares ${spares[*]}"
}

begin_grace() { # "yes" if a watchdog runs: then the other ranks get time to print their own table
  [[ $phase == running ]] || return 0
  phase=grace deadline=$SECONDS
  [[ $1 != yes ]] || deadline=$((SECONDS + grace_s))
  ((deadline > SECONDS)) || begin_stop
}

begin_stop() {
  handle_exits no
  [[ $phase != stopping && $phase != quitting ]] || return 0
  phase=stopping deadline=$((SECONDS + 5 * term_s))
  command_all stop
  ! all_stopped || begin_quit
}

# Agents that are not ready yet do not have to stop: they have no ranks, and end when their stdin ends.
all_stopped() {
  local h
  for h in "${!transport_pid[@]}"; do ((${num_stopped[h]:-0} >= ${num_ready[h]:-0})) || return 1; done
}

# The agents have stopped and reported everything. Finds the guilty rank and asks for its last lines.
begin_quit() {
  [[ $phase != quitting ]] || return 0
  phase=quitting deadline=$((SECONDS + 2 * term_s))
  find_guilty
  command_all "quit $([[ -z $guilty ]] && echo - || process_of "$guilty")"
  local fd
  for fd in "${command_fds[@]}"; do exec {fd}>&-; done
  command_fds=()
}

process_of() { # prints the newest process of a rank
  local process last=$1
  for process in "${!is_rank[@]}"; do ((is_rank[process] != $1)) || last=$process; done
  echo "$last"
}

on_deadline() {
  local h
  deadline=
  case $phase in
    connecting)
      error_status=69 job_error="host $(for h in "${!host_names[@]}"; do [[ -n ${agent_host[h]:-} ]] || { echo "${host_names[h]}" && break; }; done)"
      job_error+=": no answer within $connect_s s"
      begin_stop
      ;;
    grace) begin_stop ;;
    stopping) begin_quit ;;
    quitting) for h in "${transport_pid[@]}"; do kill -KILL "$h"; done 2>/dev/null ;;
  esac
}

on_closed() { # host, status of ssh, srun or the local agent
  local h=$1 why fd=${command_fds[$1]:-}
  local -a agent_command
  set_agent_command "$h"
  num_open=$((num_open - 1))
  unset "transport_pid[h]" "command_fds[h]"
  [[ -z $fd ]] || exec {fd}>&-
  [[ $phase != quitting ]] || return 0
  why=${transport_text[h]:-}
  [[ -n $why ]] || why="${agent_command[0]}: $(ended_text "$2")"
  if [[ $phase == running ]] && ((h > 0)); then # the coordination service is on host 0
    unanswered[h]=$why
    ask
    return 0
  fi
  end_without "$h" "$why"
}

num_agents() { [[ $transport == slurm ]] && echo "${num_ready[0]:-0}" || echo "${#command_fds[@]}"; }

# Asks all agents whether they have ranks that can continue after a loss. Answers to earlier questions do not count.
ask() {
  question=$((question + 1)) num_no=0
  command_all "asks $question"
}

# Handles an agent's answer to the last question.
on_answer() { # yes or no
  local h why
  [[ $1 == yes ]] || num_no=$((num_no + 1))
  [[ $1 == yes ]] || ((num_no == $(num_agents))) || return 0
  for h in "${!unanswered[@]}"; do
    why=${unanswered[h]}
    unset "unanswered[h]"
    [[ $phase == running ]] && replace_host "$h" "$why" "$1" || end_without "$h" "$why"
  done
  handle_exits "$1"
}

handle_exits() { # the answer of the agents to what was not clear: yes, or no
  local text
  local -a words texts=("${unanswered_exits[@]}")
  unanswered_exits=()
  for text in "${texts[@]}"; do
    read -ra words <<<"$text"
    on_exit "${words[@]::4}" "$([[ $1 == yes ]] && echo yes || echo none)" "${words[4]:-}"
  done
}

# Ends the job, which cannot continue without a host that has no agent any more.
end_without() { # index of the host, why
  local h=$1 why=$2
  if [[ $phase == connecting && -z $job_error ]]; then
    error_status=69 job_error="$(place "$h")$why"
  elif [[ $phase == running || $phase == grace ]] && [[ -z $lost ]]; then
    lost="$h $why"
  fi
  begin_stop
  ! all_stopped || begin_quit
}

# Sets guilty (a rank, or empty), job_status and job_text.
find_guilty() {
  local rank verdict
  local -a all_verdicts=("${verdicts[@]}")
  job_text=
  if [[ -n $interrupted ]]; then
    job_status=$((128 + $(kill -l "$interrupted"))) job_text="ended by SIG$interrupted"
    ! all_ended_well || job_text="stopped by SIG$interrupted; all ranks ended by themselves, with status 0"
  elif [[ -n $job_error ]]; then
    job_status=$error_status job_text=$job_error
  elif [[ -n $signalled ]]; then
    job_status=$((128 + $(kill -l "${signalled%% *}"))) job_text="ended by SIG$signalled"
  elif [[ -n $service_failure ]]; then
    job_status=${service_failure%% *} job_text="coordination service: ${service_failure#* }"
    ((job_status)) || job_status=69
  elif [[ -n $lost && -z $first_failure ]]; then
    job_status=69 job_text="the ranks' step was lost: ${lost#* }"
    [[ $transport == slurm ]] || {
      guilty=${first_ranks[${lost%% *}]} && job_text="rank $guilty: its host ${host_names[${lost%% *}]} was lost: ${lost#* }"
    }
  elif [[ -n $first_failure ]]; then
    guilty=$first_failure
    if ((statuses[guilty] == 75 && ${#verdicts[@]})); then
      # The watchdog ended the job, so it knows which rank is to blame.
      job_text=${all_verdicts[0]#jax-mpmd: }
      [[ ! $job_text =~ ^rank\ ([0-9]+): ]] || guilty=${BASH_REMATCH[1]}
    elif ((statuses[guilty] == 75)); then
      for rank in "${order[@]}"; do
        ((statuses[rank] == 75 || statuses[rank] == 0)) || { guilty=$rank && break; }
      done
    elif ((statuses[guilty] < 128)); then
      for verdict in "${verdicts[guilty]:-}" "${all_verdicts[@]}"; do
        [[ $verdict == "jax-mpmd: rank $guilty: "* ]] || continue
        job_text=${verdict#jax-mpmd: } # explains more than the status
        break
      done
    fi
    job_status=${statuses[guilty]:-75}
    # The launcher knows how the rank ended. The other ranks only saw that it did.
    [[ ! $job_text =~ ^rank\ [0-9]+:\ (died:|left\ the\ program|exit\ status) ]] || ((job_status == 0 || job_status == 75)) || job_text=
    [[ -z $job_text ]] || ! was_ended_by_us "$guilty" || job_status=75
    ((job_status)) || job_status=75
    [[ -n $job_text ]] || job_text="rank $guilty: $(ended_text "$job_status")"
  else
    job_status=0
  fi
}

all_ended_well() {
  local status
  ((${#statuses[@]} == num_ranks)) || return 1
  for status in "${statuses[@]}"; do ((status == 0)) || return 1; done
}

was_ended_by_us() { # the rank was still there when the launcher began to stop the job
  local rank
  for rank in "${order[@]}"; do ((rank != $1)) || return 1; done
}

# Prints the summary, after everything that the ranks printed.
conclude() { # seconds
  local last
  ((${#left[@]} == 0)) || printf 'jax-mpmd: these processes do not end: %s\n' "${left[@]}" >&2
  ((job_status)) || return 0
  {
    printf 'jax-mpmd: %s\n' "$job_text"
    if [[ -n $guilty ]]; then
      printf '  on %s%s, %s s after the start' "${host_of[$(process_of "$guilty")]:-?}" "${rank_pids[guilty]:+, pid ${rank_pids[guilty]}}" "$1"
      # Its own verdict and table are printed above: the verdict in the line before this one.
      last=$(sed -E '/^jax-mpmd: rank [0-9]+: /d; /^  rank  host /,/^[^ ]/{/^  /d;}; s/^/  | /' "$tmp/last" 2>/dev/null)
      [[ -z $last ]] && printf '%s\n' "$([[ -s $tmp/last ]] || echo '; it printed nothing')" || printf '; its last lines:\n%s\n' "$last"
    fi
    [[ -n $interrupted || -n $job_error ]] || print_table
  } >&2
}

print_table() {
  local rank ended step seconds what
  ((${#doing[@]})) || return 0
  for rank in "${!statuses[@]}"; do ((statuses[rank] != 75)) || return 0; done # another rank has printed the table
  printf '  %-5s %-16s %-8s %-20s %6s %7s  %s\n' rank host pid ended step for doing
  for ((rank = 0; rank < num_ranks; rank++)); do
    ended='no answer'
    [[ -z ${statuses[rank]:-} ]] || ended=$(was_ended_by_us "$rank" && echo 'by the launcher' || ended_text "${statuses[rank]}")
    read -r step seconds what <<<"${doing[rank]:-- - -}"
    printf '  %-5s %-16s %-8s %-20s %6s %7s  %s\n' "$rank" "${host_of[$(process_of "$rank")]:--}" "${rank_pids[rank]:--}" "$ended" \
      "$step" "$seconds s" "$what"
  done
}

main() {
  ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || die 69 "bash 4.4 or later is needed; this is $BASH_VERSION"
  eval "$set_aside"
  [[ -z ${MPMD_JOB:-} ]] || unset MPMD_LEDGER_DIR MPMD_FLIGHT_DIR MPMD_REPLACE_SLOW MPMD_HANG_TIMEOUT_S # of the job that it runs in
  declare -gA keepers=() keeper_pids=() keeper_fds=() unfit=() left_out=() away=() # by host
  parse "$@"
  plan
  all_names=("${host_names[@]}") all_counts=("${host_counts[@]}") all_ranks=$num_ranks
  folder=$PWD attempt=0 interrupted='' events=2 keeper='' host_of=()
  keeper_token=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
  script_text=$(<"${BASH_SOURCE[0]}")
  line_width=3900 # a pipe takes up to 4096 bytes atomically
  [[ $transport != slurm ]] || line_width=900 # and srun 1024
  [[ -z $dry_run ]] || { print_dry_run && exit 0; }
  [[ $log_dir == /* || -z $log_dir ]] || log_dir=$PWD/$log_dir
  trap '' PIPE
  local signal
  # shellcheck disable=SC2064 # the name of the signal is expanded now
  for signal in INT TERM HUP; do trap "{ printf '%s\n' '- launcher_signal $signal' >&\"\$events\"; } 2>/dev/null; interrupted=$signal" "$signal"; done
  for ((attempt = 0; ; attempt++)); do
    order=()
    local started=$SECONDS
    ((attempt == 0)) || plan_again
    start_keepers
    ((attempt == 0)) || { leave_out_unreachable && leave_out_unfit; }
    run_job
    ((job_status != 0 && attempt < restarts)) && [[ -z $interrupted && -z $signalled ]] || break
    [[ -z $job_error ]] || ((attempt > 0)) || break # what could be started once may be so again: hosts and folders come back
    note_failures $((SECONDS - started))
    if ((num_alike >= most_alike)); then
      say "gives up after restart $attempt of $restarts: $failure_text, $num_alike times in a row"
      break
    fi
    say "starts over in $wait_s s (restart $((attempt + 1)) of $restarts)"
    wait_between
    [[ -z $interrupted ]] || { job_status=$((128 + $(kill -l "$interrupted"))) && say "ended by SIG$interrupted" && break; }
  done
  stop_keepers
  exit "$job_status"
}

# Counts equal failures in a row (num_alike), and sets the time until the next attempt (wait_s). Without a watchdog no step
# is known, and a failure counts only if it came soon. A rank that dies for an external reason (memory, its machine) dies at
# another step the next time.
note_failures() { # seconds of the attempt
  local step=${doing[${guilty:-0}]:-} failure
  step=${step%% *}
  [[ $step =~ ^[0-9]+$ ]] || step=
  failure="$job_status $step" # not the rank: if all fail in the same way, the first one is random
  failure_text="$(ended_text "$job_status")${step:+ at step $step}"
  [[ $failure == "${last_failure:-}" ]] && { [[ -n $step ]] || (($1 < 60)); } && num_alike=$((num_alike + 1)) || num_alike=1
  [[ -z $job_error ]] || num_alike=0
  last_failure=$failure
  ((attempt > 0 && $1 < long_attempt_s)) && wait_s=$((wait_s * 2)) || wait_s=1
  ((wait_s <= longest_wait_s)) || wait_s=$longest_wait_s
}

wait_between() { # wait_s seconds, or until a signal comes
  local end=$((SECONDS + wait_s))
  while ((SECONDS < end)) && [[ -z $interrupted ]]; do sleep 0.2; done
}

if [[ $0 == jax-mpmd-agent ]]; then
  agent
elif [[ $0 == jax-mpmd-keeper ]]; then
  keep
else
  main "$@"
fi
