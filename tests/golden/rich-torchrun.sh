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
index=$(( ${1:-0} + ${SLURM_ARRAY_TASK_ID:-0} ))

module purge
module load 2025
module load PyTorch/2.6
ulimit -c 0
export A='it'"'"'s $HOME'
# Nothing that happens to lie in the working folder may stand in for a module of the worker.
export PYTHONSAFEPATH=1

python=(apptainer exec '/im age.sif' python3)
worker=("${python[@]}" -m hpcbench.worker)

# What this shell is told is noted, and passed on where no scheduler tells the ranks itself.
received='' told='' ranks=''
trap 'received=TERM; told=1' TERM INT HUP
trap 'received=USR2; told=1' USR2
trap 'told=1' CONT

attempt_folder=$("${worker[@]}" begin --tasks "$task_file" --index "$index")
begin_code=$?
if [ "$begin_code" -eq 10 ]; then
  exit 0
elif [ "$begin_code" -ne 0 ]; then
  echo "hpcbench: the worker could not begin run $index of $task_file (exit code $begin_code)" >&2
  exit "$begin_code"
fi
attempt=${attempt_folder##*/}

# One torchrun a node, each with a store of its own: the worker's rendezvous joins the nodes.
ranks_command=(srun --nodes=2 --ntasks=2 --ntasks-per-node=1
  --cpus-per-task=64 --kill-on-bad-exit=1 --label)
ranks_command+=("${python[@]}" -m torch.distributed.run --standalone --nnodes=1
  --nproc-per-node=4 --cpu-bind=cores
  -m hpcbench.worker)
if [ -z "$received" ]; then
  "${ranks_command[@]}" --tasks "$task_file" --index "$index" --attempt "$attempt" \
    > "$attempt_folder/out.log" 2> "$attempt_folder/err.log" &
  ranks=$!
  while :; do
    told=''
    wait "$ranks"
    exit_code=$?
    # A signal ends the wait, not the ranks.
    [ -n "$told" ] || kill -0 "$ranks" 2> /dev/null || break
  done
else
  exit_code=143
fi

# Where the ranks died without a word, this writes down how: exit code, signal, time, out of memory.
"${worker[@]}" end --tasks "$task_file" --index "$index" --attempt "$attempt" \
  --exit-code "$exit_code" --received "$received"
exit "$?"
