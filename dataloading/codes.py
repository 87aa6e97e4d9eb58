"""The registry of finding codes: what each means, what proves it, what rules it out, what helps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from dataloading.results import Result, format_value

SEVERITIES = ("info", "warning", "critical")

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and line feed


@dataclass(frozen=True)
class Code:
    """One entry of the registry."""

    group: str
    meaning: str
    proof: str
    ruled_out_by: str
    advice: str
    notebook: str


CODES: Mapping[str, Code] = MappingProxyType(
    {
        "compute": Code(
            group="time",
            meaning="The train step takes the time; the data is there when it is asked for.",
            proof="The share of waiting is small, and a replay of one fixed batch is as slow.",
            ruled_out_by="A replay of one fixed batch that is much faster than the real run.",
            advice="Leave the loader as it is; make the model, the precision or the step faster.",
            notebook="01",
        ),
        "host-work": Code(
            group="time",
            meaning="Other work of the training process takes the time: logging, hooks, checkpoints.",
            proof="Much of a step is neither waiting nor training, or rare steps are far longer.",
            ruled_out_by="Waiting and training together fill the step.",
            advice="Do that work less often, or in a thread or process of its own.",
            notebook="01",
        ),
        "too-few-workers": Code(
            group="time",
            meaning="More workers would help: the work waits, or CPUs are free.",
            proof="Training waits, and the predicted step with more workers is shorter.",
            ruled_out_by="All usable CPUs already prepare data, or a batch costs next to nothing.",
            advice="Raise num_workers.",
            notebook="00",
        ),
        "cpu-bound": Code(
            group="time",
            meaning="All usable CPUs are busy preparing data; more workers only share them.",
            proof="Training waits, and the CPU work of a batch over the usable CPUs is the limit.",
            ruled_out_by="Samples that mostly wait, or CPUs without work.",
            advice="Make a sample cheaper, cache it (CachedDataset), or move work to the accelerator "
            "(split_transform moves the conversion to float).",
            notebook="09",
        ),
        "per-sample-overhead": Code(
            group="time",
            meaning="Samples are so small that handling each one costs more than its content.",
            proof="A sample takes microseconds, and preparing a batch is mostly calls.",
            ruled_out_by="Samples that take much longer than a few calls.",
            advice="Fetch a whole batch at once (`__getitems__`, or tensors sliced by batch), "
            "without workers.",
            notebook="00",
        ),
        "collate": Code(
            group="time",
            meaning="Putting samples together into a batch takes most of the loading time.",
            proof="Collating takes the larger part of a batch's time.",
            ruled_out_by="Fetching the samples takes longer than collating them.",
            advice="Collate smaller types (uint8), avoid padding to the longest, write into one "
            "tensor made beforehand.",
            notebook="01",
        ),
        "transfer": Code(
            group="time",
            meaning="Handing finished batches from worker to main process takes most of the time.",
            proof="Sending a batch takes longer than preparing it.",
            ruled_out_by="A loader without workers, or batches that are cheap to send.",
            advice="Send fewer, smaller tensors: uint8 instead of float32 (split_transform does that "
            "to images), one tensor instead of many.",
            notebook="01",
        ),
        "epoch-startup": Code(
            group="time",
            meaning="Starting workers anew takes a large part of each epoch.",
            proof="The first batch of a later epoch is late, compared with the whole epoch.",
            ruled_out_by="Long epochs, or workers that are kept.",
            advice="Set persistent_workers=True.",
            notebook="01",
        ),
        "interference": Code(
            group="time",
            meaning="Loader and training are each fast alone, and slow together.",
            proof="The real run is much slower than both arms alone.",
            ruled_out_by="One of the arms alone is as slow as the real run.",
            advice="Look for what they share: CPUs (threads of the train step), the GIL, other "
            "processes.",
            notebook="01",
        ),
        "invalid-settings": Code(
            group="setup",
            meaning="Some settings have no effect in this combination, or are refused by PyTorch.",
            proof="The option is dropped when the settings are cleaned.",
            ruled_out_by="Every setting is accepted as it is.",
            advice="Drop the option, or set what it needs.",
            notebook="00",
        ),
        "pin-without-accelerator": Code(
            group="setup",
            meaning="pin_memory=True where no accelerator can copy from pinned memory.",
            proof="pin_memory is on, and there is no CUDA or XPU device.",
            ruled_out_by="A CUDA or XPU device, or pin_memory=False.",
            advice="Set pin_memory=False here; it only costs.",
            notebook="00",
        ),
        "cpu-quota": Code(
            group="time",
            meaning="The process may use fewer CPUs than the machine has, and is held back by "
            "that.",
            proof="The usable CPUs are fewer than the logical ones, or the cgroup counts "
            "throttled periods, while training waits for CPU work.",
            ruled_out_by="All CPUs of the machine may be used, or the samples mostly wait.",
            advice="Ask for more CPUs (scheduler, container), and use no more workers than CPUs.",
            notebook="03",
        ),
        "thread-oversubscription": Code(
            group="time",
            meaning="Workers run several threads each, so that there are more busy threads than "
            "CPUs.",
            proof="A worker uses more CPU time than its loading thread, and the threads of "
            "all workers outnumber the usable CPUs.",
            ruled_out_by="One busy thread per worker.",
            advice="Give each worker one thread: torch.set_num_threads(1), "
            "cv2.setNumThreads(0), OMP_NUM_THREADS=1.",
            notebook="03",
        ),
        "straggler": Code(
            group="time",
            meaning="Now and then a batch takes far longer, and the batches after it are ready "
            "but must wait their turn.",
            proof="Training waits while finished batches stand in the queue, and the slowest "
            "batches take many times the median.",
            ruled_out_by="Batches that all take about as long, or an empty queue whenever training "
            "waits.",
            advice="Make the slow samples cheaper, or deliver in any order (in_order=False) where "
            "the order need not repeat: a run that resumes in mid-epoch needs it to.",
            notebook="03",
        ),
        "host-to-device": Code(
            group="time",
            meaning="Copying batches to the accelerator takes much of the step.",
            proof="Moving a batch to the device takes a large share of the time.",
            ruled_out_by="Copies that take little of the step.",
            advice="Pin memory, copy with non_blocking=True, send uint8 and convert on the device.",
            notebook="04",
        ),
        "dataset-pickling": Code(
            group="time",
            meaning="Starting workers takes long because each is sent a pickled copy of a large "
            "data set.",
            proof="The workers are spawned, and pickling the data set takes seconds or megabytes.",
            ruled_out_by="Workers that are forked, or a data set that pickles to little.",
            advice="Keep big things out of the data set object: open files lazily, hold arrays "
            "or shared tensors.",
            notebook="05",
        ),
        "cold-storage": Code(
            group="time",
            meaning="The first pass reads from storage; later ones find the data in the page "
            "cache.",
            proof="The first epoch reads from storage and waits; later ones read almost nothing.",
            ruled_out_by="Epochs that all read as much, or none that waits.",
            advice="Judge by a later epoch, or read the files once before training.",
            notebook="06",
        ),
        "storage-bound": Code(
            group="time",
            meaning="Reading from storage takes the time, in every epoch.",
            proof="Samples mostly wait, and most bytes they read come from storage every time.",
            ruled_out_by="Reads that are answered by the page cache.",
            advice="Keep the data in memory or on a faster disk, or read less of it.",
            notebook="06",
        ),
        "small-files": Code(
            group="time",
            meaning="Opening many small files takes longer than reading what is in them.",
            proof="Opening takes the larger part of a sample, and each open brings few bytes.",
            ruled_out_by="Few opens per sample, or opens that are quick.",
            advice="Pack samples into larger files (shards, an archive, one array); shards limit "
            "shuffling to their order and a buffer of samples.",
            notebook="06",
        ),
        "superlinear-dataset": Code(
            group="time",
            meaning="A sample becomes more expensive the more samples there are.",
            proof="Time per epoch grows faster than the number of samples: the interval of "
            "the exponent lies above 1.1.",
            ruled_out_by="An exponent whose interval holds 1.",
            advice="Look things up in a dict or index made once, instead of searching through "
            "all samples.",
            notebook="02",
        ),
        "slow-sampler": Code(
            group="time",
            meaning="Choosing the next index takes the time, in the training process.",
            proof="Most of the waiting is spent in the sampler.",
            ruled_out_by="A sampler that takes little of the wait.",
            advice="Draw all indices of an epoch at once, or make the sampler cheaper.",
            notebook="08",
        ),
        "serialised-workers": Code(
            group="time",
            meaning="Workers wait for one another (a lock, one connection), so more of them do "
            "not help.",
            proof="With more workers each sample takes longer, though neither CPU work nor "
            "waiting for a CPU grows.",
            ruled_out_by="A rate that grows with the workers, or CPUs that are all busy.",
            advice="Give each worker its own connection or file, and shorten what is done "
            "under the lock.",
            notebook="10",
        ),
        "slow-rank": Code(
            group="time",
            meaning="One process of a distributed job is slower, and all others wait for it.",
            proof="One rank waits for data while the others wait for it.",
            ruled_out_by="Ranks that are about as fast.",
            advice="Look at that rank: its storage, its CPUs, the size of its samples.",
            notebook="08",
        ),
        "copy-on-write-growth": Code(
            group="memory",
            meaning="Forked workers copy memory pages by reading Python objects on them.",
            proof="Private memory (USS) of the workers grows while resident memory (RSS) "
            "stays, or the data set holds very many Python objects and workers are "
            "forked.",
            ruled_out_by="USS that stays, or RSS that grows along.",
            advice="Hold the metadata in NumPy arrays, tensors or Arrow instead of lists and "
            "dicts of objects.",
            notebook="05",
        ),
        "worker-memory-leak": Code(
            group="memory",
            meaning="Workers keep more and more memory with each sample.",
            proof="Private and resident memory of the workers grow together, without end.",
            ruled_out_by="Growth that levels off, or resident memory that stays.",
            advice="Find what __getitem__ keeps (a cache, a list) and bound it; "
            "persistent_workers=False hides it.",
            notebook="05",
        ),
        "main-memory-leak": Code(
            group="memory",
            meaning="The training process keeps more and more memory.",
            proof="Memory of the main process grows with each step, also on one fixed batch.",
            ruled_out_by="A main process that stays, or only workers that grow.",
            advice="Keep numbers, not tensors: loss.item(), detach(), and drop references to "
            "batches.",
            notebook="05",
        ),
        "prefetch-memory": Code(
            group="memory",
            meaning="Batches that are prepared ahead take much memory.",
            proof="Workers x prefetch factor x bytes of a batch is a large part of the free "
            "memory.",
            ruled_out_by="A queue that is small beside the free memory.",
            advice="Lower prefetch_factor; it buys slack, not rate.",
            notebook="05",
        ),
        "shared-memory-short": Code(
            group="memory",
            meaning="Finished batches do not fit into shared memory; workers would die of a bus "
            "error.",
            proof="Workers x prefetch factor x bytes of a batch exceeds what is free in /dev/shm.",
            ruled_out_by="A queue that fits.",
            advice="Use fewer workers, a smaller prefetch factor or smaller batches, or "
            "enlarge /dev/shm.",
            notebook="05",
        ),
        "file-descriptors-short": Code(
            group="memory",
            meaning="The tensors in flight need more file descriptors than the process may open.",
            proof="Queued tensors, plus those that the loop keeps, come near the limit of "
            "open files.",
            ruled_out_by="Few tensors in flight, or a high limit.",
            advice="Copy what you keep (clone), send fewer tensors, raise the limit, or use "
            "the file_system sharing strategy.",
            notebook="05",
        ),
        "duplicate-samples": Code(
            group="samples",
            meaning="An epoch delivers samples more than once.",
            proof="More samples are delivered than there are different ones.",
            ruled_out_by="Every sample comes once.",
            advice="Let each worker and rank yield its own share.",
            notebook="08",
        ),
        "missing-distributed-sampler": Code(
            group="samples",
            meaning="Every rank goes through the whole data set.",
            proof="Ranks deliver the same samples.",
            ruled_out_by="Ranks that share nothing.",
            advice="Use DistributedSampler, or give each rank its own part.",
            notebook="08",
        ),
        "epoch-not-set": Code(
            group="samples",
            meaning="Every epoch has the same shuffled order.",
            proof="Two epochs deliver the same order, though the sampler shuffles by epoch.",
            ruled_out_by="Orders that differ, or no shuffling.",
            advice="Call sampler.set_epoch(epoch) before each epoch.",
            notebook="08",
        ),
        "dropped-samples": Code(
            group="samples",
            meaning="Some samples are in no batch.",
            proof="Fewer samples are delivered than there are.",
            ruled_out_by="Every sample comes.",
            advice="Set drop_last=False where the rest matters, or choose a batch size that "
            "divides the set.",
            notebook="08",
        ),
        "repeated-random-numbers": Code(
            group="samples",
            meaning="Random augmentation repeats: between workers, or from epoch to epoch.",
            proof="The same sample, fetched again and again, goes through the same values in "
            "two workers or epochs.",
            ruled_out_by="Values that differ, or that are not random.",
            advice="Seed in worker_init_fn from torch.initial_seed(), and make no generator in "
            "the data set's constructor.",
            notebook="10",
        ),
        "sample-overlap": Code(
            group="samples",
            meaning="Ranks share some of their samples.",
            proof="Samples of one rank are delivered to another one too.",
            ruled_out_by="Ranks that share nothing but the padding.",
            advice="Seed all ranks alike and set the same epoch on each.",
            notebook="08",
        ),
        "unpicklable": Code(
            group="setup",
            meaning="A part of the loader cannot be sent to spawned workers.",
            proof="Pickling it fails, or a child could not import where it is defined.",
            ruled_out_by="Pickling works.",
            advice="Define it in a module, at top level; use functools.partial instead of a "
            "lambda.",
            notebook="10",
        ),
        "fork-unsafe-handle": Code(
            group="setup",
            meaning="Something that was open or in use before the fork (a file, a connection, a "
            "library with threads) is shared by forked workers, or broken in them.",
            proof="An open handle hangs on the data set, and there are workers; or an error that "
            "only forked copies give.",
            ruled_out_by="Handles that are opened on first use, in the worker.",
            advice="Open it in the worker, on first use, instead of in the constructor.",
            notebook="10",
        ),
        "accelerator-in-worker": Code(
            group="setup",
            meaning="The data set holds tensors on an accelerator, which a forked worker cannot "
            "use.",
            proof="A tensor of the data set lives on an accelerator, and there are workers.",
            ruled_out_by="Tensors on the CPU.",
            advice="Keep data on the CPU and move batches in the training loop.",
            notebook="10",
        ),
        "bad-images": Code(
            group="setup",
            meaning="Image files cannot be read.",
            proof="Decoding them fails.",
            ruled_out_by="All files decode.",
            advice="Repair, replace or remove the files.",
            notebook="06",
        ),
        "uneven-shapes": Code(
            group="setup",
            meaning="Samples have different shapes, which cannot be stacked into a batch.",
            proof="A field has different shapes in different samples, and the usual collate "
            "function.",
            ruled_out_by="Equal shapes, or a collate function that pads.",
            advice="Resize or pad to one shape, or give a collate_fn that does.",
            notebook="10",
        ),
        "worker-died": Code(
            group="setup",
            meaning="A worker process ended by itself.",
            proof="Its exit code.",
            ruled_out_by="Workers that live.",
            advice="Read the exit code: -9 was killed (memory), -7 ran out of shared memory, "
            "-11 crashed in native code.",
            notebook="10",
        ),
        "worker-hang": Code(
            group="setup",
            meaning="A worker does not answer.",
            proof="No batch came within the time limit, while a sample was being fetched.",
            ruled_out_by="Batches that come.",
            advice="Look at the sample and at what it waits for; a lock or library that was in "
            "use during the fork cannot be used in the worker.",
            notebook="10",
        ),
        "worker-error": Code(
            group="setup",
            meaning="The data set raised an exception.",
            proof="The exception, with the index of its sample.",
            ruled_out_by="No exception.",
            advice="Mend or skip the sample.",
            notebook="10",
        ),
    }
)


@dataclass(frozen=True, repr=False, eq=False)
class Finding(Result):
    """One thing that was found, with the numbers that show it.

    Attributes:
        code: The entry in the registry `CODES`.
        group: `time`, `memory`, `samples` or `setup`.
        severity: `info`, `warning` or `critical`.
        message: What was found, in one sentence with figures.
        evidence: The numbers behind it, thresholds and steps included: name -> value.
        advice: What to do.
        expected_gain: Predicted rate over the present rate when the advice is taken; None where it
            cannot be computed.
    """

    code: str
    group: str
    severity: str
    message: str
    evidence: Mapping[str, Any]
    advice: str
    expected_gain: float | None = None

    derived: ClassVar[tuple[str, ...]] = ()

    def summary(self) -> str:
        """Severity, code and message."""
        return f"[{self.severity}] {self.code}: {self.message}"

    def rows(self) -> list[tuple[str, Any]]:
        """The finding and each number behind it."""
        gain = "not predicted" if self.expected_gain is None else f"{self.expected_gain:.2f}x"
        numbers = [(f"  {k}", format_value(k, v)) for k, v in self.evidence.items()]
        return [
            ("finding", f"{self.code} ({self.severity})"),
            ("meaning", CODES[self.code].meaning),
            ("message", self.message),
            *numbers,
            ("advice", self.advice),
            ("expected gain", gain),
        ]


def finding(
    code: str,
    message: str,
    evidence: Mapping[str, Any],
    *,
    severity: str = "warning",
    advice: str | None = None,
    expected_gain: float | None = None,
) -> Finding:
    """Make a finding of a registered code; its group and usual advice come from the registry.

    A gain below 1 is none, and is left out. Control characters, which somebody's exception may
    hold, do not reach the reader's terminal.

    Raises:
        KeyError: The code is not registered.
        ValueError: The severity is unknown.
    """
    entry = CODES[code]
    if severity not in SEVERITIES:
        raise ValueError(f"severity={severity!r} must be one of {SEVERITIES}.")
    return Finding(
        code=code,
        group=entry.group,
        severity=severity,
        message=CONTROL.sub("?", message),
        evidence=dict(evidence),
        advice=advice or entry.advice,
        expected_gain=expected_gain if (expected_gain or 0.0) >= 1 else None,
    )
