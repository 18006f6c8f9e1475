#!/bin/bash
# sweep on local, rendered by hpcbench 0.1.0.
# The runs are the lines of the task file; this script is the same for all of them.
set -u

task_file=/shared/results/cluster/submissions/sweep-0001/0.jsonl
# A job carries `pack` of the file's runs, one after another: from `first` to the one before `last`.
pack=1 runs=8
job=$(( ${1:-0} + ${SLURM_ARRAY_TASK_ID:-0} ))
first=$(( job * pack ))
last=$(( first + pack < runs ? first + pack : runs ))

# Python must not import files of the working folder in place of modules of the worker.
export PYTHONSAFEPATH=1

python=(/venv/bin/python)
worker=("${python[@]}" -m hpcbench.worker)

# What this shell is told is noted, and passed on where no scheduler tells the ranks itself.
received='' told='' ranks=''
trap 'received=TERM; told=1; [ -z "$ranks" ] || kill -TERM "$ranks" 2> /dev/null' TERM INT HUP
# torchrun passes on TERM alone: a file is the difference between the time limit and a cancellation.
trap 'received=USR2; told=1; [ -z "$ranks" ] || { : > "$attempt_folder/limit-warning"; kill -TERM "$ranks"; } 2> /dev/null' USR2
trap 'told=1' CONT
preempted=''
attempt_pattern=$'/[^\n]*/runs/[0-9a-f]+/[0-9a-f]+/attempts/[0-9]+'

# One run: its attempt is begun, its ranks are launched, its end is recorded.
one_run() {
  # A scheduler tells every process of a job to end: not the short steps before and after the ranks.
  # Wrappers of the interpreter and the site's prologs may print before, beside and after the folder.
  begin_output=$(trap '' TERM INT HUP USR1 USR2; "${worker[@]}" begin --tasks "$task_file" --index "$index")
  begin_code=$?
  if [ "$begin_code" -eq 10 ]; then
    return 0
  elif [ "$begin_code" -ne 0 ]; then
    echo "hpcbench: the worker could not begin run $index of $task_file (exit code $begin_code)" >&2
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

  ranks_command=("${worker[@]}" fork --ranks 2)
  if [ -z "$received" ]; then
    # Where a group shares the tree: nothing that somebody put in a log's place is written to.
    set -C
    "${ranks_command[@]}" --tasks "$task_file" --index "$index" --attempt "$attempt" \
      > "$attempt_folder/out.log" 2> "$attempt_folder/err.log" &
    ranks=$!
    set +C
    [ -z "$received" ] || kill -TERM "$ranks" 2> /dev/null
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
    "${worker[@]}" end --tasks "$task_file" --index "$index" --attempt "$attempt" \
      --exit-code "$exit_code" --received "$received" --job-says "$job_says"
  )
  end_code=$?
  return "$end_code"
}

code=0
for (( index = first; index < last; index++ )); do
  if [ -n "$received$preempted" ]; then
    # Told to stop, or put back into the queue: the runs that are left have not begun.
    [ -n "$preempted" ] || code=143
    break
  elif [ "$index" -gt "$first" ] && [ $(( SECONDS + 1800 )) -gt 1800 ]; then
    echo "hpcbench: no time is left for run $index and those after it: submit again" >&2
    break
  fi
  one_run || code=$?
done
exit "$code"
