#!/bin/bash
#SBATCH --job-name=hpcbench-sweep-0001-0
#SBATCH --partition=gpu_a100
#SBATCH --account='project 42'
#SBATCH --qos=high
#SBATCH --constraint='a&b'
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --gres=gpu:a100:4
#SBATCH --mem=491520M
#SBATCH --exclusive
#SBATCH --time=0-01:30:00
#SBATCH --signal=USR2@60
#SBATCH --open-mode=append
#SBATCH --chdir=/shared/results/cluster/submissions/sweep-0001
#SBATCH --output=/shared/results/cluster/submissions/sweep-0001/0.%A.%a.log
#SBATCH --error=/shared/results/cluster/submissions/sweep-0001/0.%A.%a.log
#SBATCH --no-requeue
#SBATCH --uenv=one
#SBATCH --uenv=two
#SBATCH --switches=2@1:00:00
# sweep on rich, rendered by hpcbench 0.1.0.
# The runs are the lines of the task file; this script is the same for all of them.
set -u

task_file=/shared/results/cluster/submissions/sweep-0001/0.jsonl
# A job carries `pack` of the file's runs, one after another: from `first` to the one before `last`.
pack=1 runs=8
job=$(( ${1:-0} + ${SLURM_ARRAY_TASK_ID:-0} ))
first=$(( job * pack ))
last=$(( first + pack < runs ? first + pack : runs ))
# The last task of an array has the array's own number as SLURM_JOB_ID: by that, all tasks would be meant.
job_id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}
job_id=${job_id:-${SLURM_JOB_ID:-}}
# It was for the shell that submitted: here each command means the cluster that this job is on.
unset SLURM_CLUSTERS

module purge
# A module that is absent must not leave the runs with this shell's own software. Old Tcl modules return 0 even then:
# LOADEDMODULES decides.
missing_module='' modules_before=${LOADEDMODULES-}
check_module() {
  local why=''
  if ! command -v module > /dev/null 2>&1; then
    why='this shell has no command "module"'
  elif [ "$2" -ne 0 ]; then
    why="module load ended with exit code $2"
  elif [ "${LOADEDMODULES-}" = "$modules_before" ]; then
    case ":$modules_before:" in *":$1:"* | *":$1/"*) ;; *) why='module load returned 0 and loaded nothing' ;; esac
  fi
  modules_before=${LOADEDMODULES-}
  [ -z "$why" ] || [ -n "$missing_module" ] || missing_module="module $1 cannot be loaded on $(uname -n): $why"
}
module load 2025; check_module 2025 "$?"
module load PyTorch/2.6; check_module PyTorch/2.6 "$?"
ulimit -c 0
export CUDA_DEVICE_MAX_CONNECTIONS=32
export CUDA_MODULE_LOADING=EAGER
export A='it'"'"'s $HOME'
# Python must not import files of the working folder in place of modules of the worker.
export PYTHONSAFEPATH=1

python=(apptainer exec '/im age.sif' python3)
worker=("${python[@]}" -m hpcbench.worker)

# What this shell is told is noted, and passed on where no scheduler tells the ranks itself.
received='' told='' ranks=''
trap 'received=TERM; told=1' TERM INT HUP
trap 'received=USR1; told=1' USR1
trap 'received=USR2; told=1' USR2
trap 'told=1' CONT
preempted=''
attempt_pattern=$'/[^\n]*/runs/[0-9a-f]+/[0-9a-f]+/attempts/[0-9]+'
begin_failed=''

# One run: its attempt is begun, its ranks are launched, its end is recorded.
one_run() {
  # A scheduler tells every process of a job to end: not the short steps before and after the ranks.
  # Wrappers of the interpreter and the site's prologs may print before, beside and after the folder.
  begin_output=$(trap '' TERM INT HUP USR1 USR2; "${worker[@]}" begin --tasks "$task_file" --index "$index" \
    --missing-module "${missing_module-}")
  begin_code=$?
  if [ "$begin_code" -eq 10 ]; then
    return 0
  elif [ -n "${missing_module-}" ]; then
    # The interpreter may be that module's: this shell leaves the record, and the next status or submit reads it.
    echo "hpcbench: run $index of $task_file: $missing_module" >&2
    (set -C; echo "$missing_module" > "${task_file%.jsonl}.$index.unsupported") 2> /dev/null
    return 0
  elif [ "$begin_code" -ne 0 ]; then
    echo "hpcbench: the worker could not begin run $index of $task_file (exit code $begin_code)" >&2
    begin_failed=1
    return "$begin_code"
  fi
  attempt_folder=''
  [[ ! $begin_output =~ $attempt_pattern ]] || attempt_folder=${BASH_REMATCH[0]}
  while [ ! -d "$attempt_folder" ] && [[ $attempt_folder == /*/* ]]; do
    attempt_folder=${attempt_folder#/}
    attempt_folder=/${attempt_folder#*/}
  done
  if [ ! -d "$attempt_folder" ]; then
    echo "hpcbench: no folder of an attempt in the worker's output: $begin_output" >&2
    return 1
  fi
  attempt=${attempt_folder##*/}

  # Not every version of SLURM hands the job's --cpus-per-task on to srun, so it is said again.
  ranks_command=(srun --nodes=2 --ntasks=8 --ntasks-per-node=4
    --cpus-per-task=16 --kill-on-bad-exit=1 --label --cpu-bind=cores
    "${python[@]}" -m hpcbench.worker)
  if [ -z "$received" ]; then
    # Where a group shares the tree: nothing that somebody put in a log's place is written to.
    set -C
    "${ranks_command[@]}" --tasks "$task_file" --index "$index" --attempt "$attempt" \
      > "$attempt_folder/out.log" 2> "$attempt_folder/err.log" &
    ranks=$!
    set +C
    while :; do
      told=''
      wait "$ranks"
      exit_code=$?
      # A signal ends the wait, not the ranks.
      [ -n "$told" ] || kill -0 "$ranks" 2> /dev/null || break
    done
    ranks=''
  else
    exit_code=143
  fi

  # Where the ranks died without a word, this writes down how: exit code, signal, time, out of memory.
  (
    trap '' TERM INT HUP USR1 USR2
    job_says=''
    [ "$exit_code" -eq 0 ] || job_says=$(timeout 20 scontrol show job --oneliner "$job_id" 2> /dev/null)
    "${worker[@]}" end --tasks "$task_file" --index "$index" --attempt "$attempt" \
      --exit-code "$exit_code" --received "$received" --job-says "$job_says"
  )
  end_code=$?
  if [ "$end_code" -eq 11 ]; then
    # The job must leave. Asking for its own restart gives the nodes back at once, and works for a job of any length;
    # where this shell was told already, the scheduler has done so itself.
    preempted=1
    if [ -z "$received" ] && ! (trap '' TERM; scontrol requeue "$job_id"); then
      echo "hpcbench: preempted, and the job may not be requeued: submit again" >&2
    fi
    return 0
  fi
  return "$end_code"
}

code=0
for (( index = first; index < last; index++ )); do
  if [ -n "$received$preempted" ]; then
    # Told to stop, or put back into the queue: the runs that are left have not begun.
    [ -n "$preempted" ] || code=143
    break
  elif [ "$index" -gt "$first" ] && [ $(( SECONDS + 5400 )) -gt 5400 ]; then
    echo "hpcbench: no time is left for run $index and those after it: submit again" >&2
    break
  fi
  one_run || code=$?
done
if [ -n "$begin_failed" ] && [ -n "$job_id" ] && [ -z "$received" ]; then
  # A node that can start nothing would be free again at once, and get job after job of the queue.
  sleep 30 &
  wait "$!"
fi
exit "$code"
