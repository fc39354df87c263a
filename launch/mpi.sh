#!/bin/bash
# Trains under mpirun of Open MPI: its options, and then the command.
#
#     launch/mpi.sh -n 2 python -m haiku_template.train --config=... --workdir=...
#     launch/mpi.sh --hostfile hosts --map-by ppr:1:node python -m haiku_template.train ...
#
# starts two processes on this machine, or one for all cards of each host of a file with
# lines such as `node1 slots=1`. This machine is the first of them: process 0 is here. All
# have the workdir, and this folder, at the same path. Inside an allocation of Slurm mpirun
# knows the nodes itself. The options are Open MPI 4's; 5 takes them by other names (PRRTE).

# NCCL's own words about what fails. Where nodes have several networks, name theirs:
# export NCCL_SOCKET_IFNAME=ib0. InfiniBand needs `ulimit -l unlimited` on each host.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

options=(
  # Else each of two processes has one core, for the threads that read its data, too.
  --bind-to none
  # Of no use without binding, and in one of twenty starts of Debian 12's Open MPI the
  # daemon of another host crashed in it.
  --mca rtc ^hwloc
  # Seconds that mpirun waits before it sends SIGTERM to the others, once one failed, and
  # again before SIGKILL. With the default, 1, they could not say what they lost.
  --mca odls_base_sigkill_timeout 30
)
# Variables that processes on other hosts would not have.
for name in PATH LD_LIBRARY_PATH PYTHONPATH ${!JAX_@} ${!XLA_@} ${!NCCL_@}; do
  if [ -n "${!name}" ]; then options+=(-x "$name"); fi
done
if [ "$(id -u)" = 0 ]; then options+=(--allow-run-as-root); fi  # As in containers.

mpirun "${options[@]}" "$@" &
run=$!

# SIGTERM to one process lets all save; mpirun would wait as above, and then end them.
stop() {
  for process in $(pgrep --parent "$run"); do
    if grep -qsz "^OMPI_COMM_WORLD_RANK=" "/proc/$process/environ"; then
      kill "$process"
      return
    fi
  done
  kill "$run"
}
trap stop TERM INT HUP USR1

while wait "$run"; code=$?; ((code > 128)) && kill -0 "$run" 2>/dev/null; do :; done
exit "$code"
