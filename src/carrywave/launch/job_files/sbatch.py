"""Writes the batch script of a job for Slurm: one task a node, which starts a worker for each device of its node.

Before the time limit Slurm sends SIGUSR1 to the script, which passes it on; the run writes a snapshot and exits with 75, and the script
puts the job back into the queue. A run that was cancelled exits with 75 too, so the code alone would not do: only the signal asks for that.
When a job is preempted or loses a node, Slurm queues it again by itself. Where the machine is at fault (74: a full disk, say), the step is
tried again after a pause, and at last the job is queued again, for other nodes or another time. Torch-free.
"""

from __future__ import annotations

import shlex

from carrywave.launch.job_files.job import STOP_SECONDS, Job

STARTS = 4  # of the step within one job: the first, and three after deaths that nothing else has mended
PAUSE_SECONDS = 60  # before another start where the machine was at fault
REQUEUES = 3  # of a job whose machines remain at fault

SCRIPT = """\
# Every node has one task, which starts a worker for each of its devices. {minutes} minutes before the time limit Slurm sends SIGUSR1: the
# run writes a snapshot and exits with 75, and the job is queued again. After a preemption or the loss of a node, Slurm queues it by itself.
# Each time the run goes on from its last snapshot (--continue).

asked= step=
on_signal() {{
    trap '' USR1
    asked=yes
    if [ -n "$step" ]; then kill -USR1 "$step"; fi
}}
trap on_signal USR1

for start in $(seq {starts}); do
    {srun} \\
        {command} &
    step=$!
    wait "$step"
    code=$?
    if [ -n "$asked" ]; then
        # The signal ended this wait, or came after it: then there is nothing more to wait for.
        wait "$step"
        again=$?
        if [ "$again" -ne 127 ]; then code=$again; fi
        break
    fi
    # Done, a mistake to correct, stopped, or interrupted: all of these are final. 74 is a fault of the machine (disk, memory, ports), which
    # may pass. Anything else is a worker or a node that died.
    case $code in 0 | 2 | 75 | 130) break ;; esac
    echo "carrywave: the step ended with exit code $code (start $start of {starts})" >&2
    if [ "$code" -eq 74 ] && [ "$start" -lt {starts} ]; then
        step=
        sleep {pause} &
        wait $!
        if [ -n "$asked" ]; then break; fi
    fi
done

# 138 is the signal itself, before the first step: there was nothing new to save.
if [ -n "$asked" ] && {{ [ "$code" -eq 75 ] || [ "$code" -eq 138 ] || [ "$code" -eq 74 ]; }}; then
    scontrol requeue "$SLURM_JOB_ID"
elif [ "$code" -eq 74 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {requeues} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def script(job: Job) -> str:
    """The text to give to sbatch."""
    cores = job.devices * job.cpus
    options = {"job-name": job.name, "nodes": job.nodes, "ntasks-per-node": 1, "cpus-per-task": cores}
    if job.on_gpus:
        options["gpus-per-node"] = job.devices if job.gpu is None else f"{job.gpu}:{job.devices}"
    if job.seconds is not None:
        options["time"] = slurm_time(job.seconds)
    options |= {"signal": f"B:USR1@{STOP_SECONDS}", "output": "%x-%j.log", "open-mode": "append"}
    head = ["#!/bin/bash", *(f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in options.items()), "#SBATCH --requeue", ""]
    # srun does not take over the number of cores from sbatch. A task that has stopped in order must not end the others, which may still be
    # writing the snapshot; those that lose one which died end by themselves.
    srun = ["srun", f"--cpus-per-task={cores}", "--kill-on-bad-exit=0", "--wait=0"]
    if job.image is not None:
        srun.append(f"--container-image={job.image}")
    words = {"srun": shlex.join(srun), "command": shlex.join(job.command(devices=True))}
    body = SCRIPT.format(minutes=STOP_SECONDS // 60, starts=STARTS, pause=PAUSE_SECONDS, requeues=REQUEUES, **words)
    return "\n".join(head) + "\n" + body


def slurm_time(seconds: int) -> str:
    """A time limit as Slurm writes it: days-hours:minutes:seconds."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02}:{minute:02}:{second:02}"
