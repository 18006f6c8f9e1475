"""What sbatch said: taken, refused, over a limit on submitted jobs, or not able to answer just now."""

from __future__ import annotations

import enum
import re


class Answer(enum.Enum):
    """The kinds of answers that differ in what is to be done next."""

    REFUSED = "refused"
    """It will not be taken, however often it is asked for."""
    LIMIT = "limit"
    """Too many jobs are submitted: fewer at once, or later."""
    AWAY = "away"
    """The scheduler was not reached."""
    UNCLEAR = "unclear"
    """The scheduler was reached and did not answer in time: it may have taken the job all the same."""


_AWAY = (
    r"Unable to contact slurm controller|Connection refused|temporarily unable to accept|Slurm backup controller|"
    r"Unable to establish (?:control|controller)|No route to host|Network is unreachable|Unable to resolve"
)
_UNCLEAR = (
    r"timed out|Zero Bytes were transmitted|Resource temporarily unavailable|Message (?:receive|send) failure|"
    r"communication (?:connection|shutdown) failure|Connection reset|Transport endpoint|Unexpected message|Broken pipe"
)
_NAMED_LIMIT = r"\b(?:QOS|Assoc)\w+Limit\b"
_SOME_LIMIT = r"job submit limit|Too many (?:jobs|tasks)"


def classify(said: str) -> Answer:
    """The kind of a failed call of sbatch, from its words.

    SLURM ends its answer with a sentence about submit, size and time limits together; where it names the limit
    besides, only that name counts.
    """
    named = re.findall(_NAMED_LIMIT, said)
    if named:
        return Answer.LIMIT if any("Submit" in name for name in named) else Answer.REFUSED
    if re.search(_SOME_LIMIT, said, re.IGNORECASE):
        return Answer.LIMIT
    if re.search(_AWAY, said, re.IGNORECASE):
        return Answer.AWAY
    return Answer.UNCLEAR if re.search(_UNCLEAR, said, re.IGNORECASE) else Answer.REFUSED
