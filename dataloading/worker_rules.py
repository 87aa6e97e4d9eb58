"""Rules about what happens inside the workers: why they are slower than they could be."""

from __future__ import annotations

from dataloading.codes import Finding, finding
from dataloading.evidence import Evidence
from dataloading.machine import Machine
from dataloading.results import format_seconds, format_share
from dataloading.time_rules import (
    LARGE_GAIN,
    MOST_OF_IT,
    compute_s,
    cpu_pace_s,
    cpus_are_full,
    is_data_bound,
    tiny_samples,
)
from dataloading.verdict import DATA_BOUND_SHARE

MANY_THREADS = 5  # a worker has two or three of its own: loading, sending, and torch's
EXTRA_CPU_SHARE = 0.4  # of a batch's time, used by threads that do not load
STRAGGLER_FACTOR = 4.0  # the slowest batches against the median
BLOCKED_SHARE = 0.3  # of the waiting while something finished stood behind the slow batch
MOST_SERIAL = 1.5  # times the number of workers
SERIAL_FACTOR = 1.6  # a batch among several workers against one with a single worker
NO_FASTER = 0.95  # of the time that a single worker takes for a batch
CPU_WAIT_SHARE = 0.25  # waiting for a CPU explains a slower batch from here on
FROM_STORAGE = 0.5  # most bytes come from storage
SOME_WAITING = 0.25  # of a batch's time, where the CPUs are not what is short
FROM_CACHE = 0.1  # nearly none does
COLD_FACTOR = 1.5  # of the waits; the hand-over is part of both, so that this is more than it seems
SMALL_READ_BYTES = 256 * 1024  # an open that brings less than this costs more than its content
FILE_FACTOR = 2.0  # looking at, reading and closing a small file cost as much again as opening it
MANY_OPENS, MANY_OPENS_SHARE = 8, 0.10  # so many small files a sample are too many all the same
SEVERAL_OPENS = 2.0  # files for one sample
SLOW_OPEN_S = 1e-3  # a single open that takes longer goes over a network, or to a disk that seeks
THROTTLED_SHARE = 0.1  # of the periods
COPY_SHARE = 0.2  # of a step spent on copying to the device
SLOW_RANK_FACTOR = 2.0  # the wait of the slowest rank against the median of the others
SLOW_PICKLING_SHARE = 0.3  # of the start-up


def thread_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Workers that run several busy threads each."""
    extra, threads = evidence.extra_cpu_share, evidence.worker_threads
    if not evidence.num_workers or extra is None or threads is None:
        return None
    if threads < MANY_THREADS or extra < EXTRA_CPU_SHARE or not is_data_bound(evidence):
        return None
    if evidence.num_workers * threads <= machine.cpus_per_rank:
        return None
    return finding(
        "thread-oversubscription",
        f"Each of {evidence.num_workers} workers runs {threads} threads on "
        f"{machine.cpus_per_rank} usable CPUs; those that do not load use the CPU for {format_share(extra)} of "
        "its time.",
        {
            "worker_threads": threads,
            "threshold_threads": MANY_THREADS,
            "extra_cpu_share": extra,
            "threshold_extra_cpu_share": EXTRA_CPU_SHARE,
            "num_workers": evidence.num_workers,
            "usable_cpus": machine.cpus_per_rank,
            "run_delay_share": evidence.run_delay_share,
        },
        severity="critical",
    )


def quota_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Fewer CPUs than the machine has, and work for more."""
    costs, step_s = evidence.costs, compute_s(evidence)
    throttled = (evidence.throttled_share or 0.0) >= THROTTLED_SHARE
    fewer = machine.logical_cpus is not None and machine.usable_cpus < machine.logical_cpus
    if not is_data_bound(evidence) or costs is None or step_s is None or not (fewer or throttled):
        return None
    cpu_s = cpu_pace_s(costs, machine)
    if costs.cpu_share < MOST_OF_IT or cpu_s < step_s or tiny_samples(evidence):
        return None
    if evidence.num_workers and evidence.num_workers < machine.cpus_per_rank:
        return None
    return finding(
        "cpu-quota",
        f"Only {machine.usable_cpus} of {machine.logical_cpus} CPUs may be used "
        f"({machine.cpu_source}), and a batch needs {format_seconds(costs.cpu_s)} of CPU work.",
        {
            "usable_cpus": machine.usable_cpus,
            "logical_cpus": machine.logical_cpus,
            "cpu_source": machine.cpu_source,
            "throttled_share": evidence.throttled_share,
            "cpu_s": costs.cpu_s,
            "step_s": step_s,
            "num_workers": evidence.num_workers,
        },
        severity="critical",
    )


def straggler_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Slow batches that hold up finished ones."""
    factor, blocked = evidence.slow_batch_factor, evidence.blocked_share
    if not evidence.num_workers or evidence.num_workers < 2 or factor is None or blocked is None:
        return None
    if factor < STRAGGLER_FACTOR or blocked < BLOCKED_SHARE:
        return None
    if (evidence.wait_share or 0.0) < DATA_BOUND_SHARE or takes_unfair_turns(evidence):
        return None
    saved = (evidence.wait_share or 0.0) * blocked
    return finding(
        "straggler",
        f"The slowest batches take {factor:.1f} times the median, and during {format_share(blocked)} of the "
        "waiting a later batch was ready.",
        {
            "slow_batch_factor": factor,
            "threshold_factor": STRAGGLER_FACTOR,
            "blocked_share": blocked,
            "threshold_blocked_share": BLOCKED_SHARE,
            "wait_share": evidence.wait_share,
            "num_workers": evidence.num_workers,
        },
        expected_gain=1 / (1 - saved) if saved < 1 else None,  # the waiting that was for its turn
        severity="critical",
    )


def takes_unfair_turns(evidence: Evidence) -> bool:
    """Whether workers wait for one another and some starve: most batches are as fast as ever.

    The mean batch tells, where all workers together are no faster than one, and no sample is slow
    by itself.
    """
    among, alone = evidence.worker_mean_batch_s, evidence.one_worker_mean_batch_s
    pace = evidence.alone_period_s or evidence.period_s
    slow = evidence.slow_sample_factor
    if not among or not alone or not pace or slow is None or slow >= STRAGGLER_FACTOR:
        return False
    return pace >= NO_FASTER * alone and among >= SERIAL_FACTOR * alone


def serialised_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Workers that wait for one another."""
    workers = evidence.num_workers
    if not workers or workers < 2 or not is_data_bound(evidence) or tiny_samples(evidence):
        return None
    if (evidence.run_delay_share or 0.0) >= CPU_WAIT_SHARE:
        return None
    among, alone = evidence.worker_batch_s, evidence.one_worker_batch_s
    if takes_unfair_turns(evidence):
        among, alone = evidence.worker_mean_batch_s, evidence.one_worker_mean_batch_s
    if not among or not alone:
        return None
    factor = among / alone
    # workers that wait for one another are at most as slow as one after the other: a batch that is
    # slower than that was made under other conditions, such as files that were read for the first time
    if not SERIAL_FACTOR <= factor <= MOST_SERIAL * workers:
        return None
    costs = evidence.costs
    if costs is not None and costs.cpu_s * workers > MOST_OF_IT * among * machine.cpus_per_rank:
        return None  # the CPUs explain it
    return finding(
        "serialised-workers",
        f"A batch takes {format_seconds(among)} with {workers} workers and "
        f"{format_seconds(alone)} with one, though they do not wait for a CPU: they wait for one "
        "another.",
        {
            "worker_batch_s": among,
            "one_worker_batch_s": alone,
            "slowdown": factor,
            "threshold_slowdown": SERIAL_FACTOR,
            "run_delay_share": evidence.run_delay_share,
            "num_workers": workers,
        },
        severity="critical",
        expected_gain=min(factor, float(workers)),
    )


def cold_storage_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """A first pass that reads from storage."""
    first, later, factor = (
        evidence.first_storage_share,
        evidence.storage_share,
        evidence.first_wait_factor,
    )
    if first is None or later is None or factor is None:
        return None
    if first < FROM_STORAGE or later > FROM_CACHE or factor < COLD_FACTOR:
        return None
    return finding(
        "cold-storage",
        f"The first pass waited {factor:.1f} times as long as the rest: {format_share(first)} of its bytes "
        f"came from storage, later {format_share(later)}.",
        {
            "first_storage_share": first,
            "storage_share": later,
            "first_wait_factor": factor,
            "threshold_factor": COLD_FACTOR,
        },
        severity="warning",
    )


def storage_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Reading from storage in every epoch."""
    costs, share = evidence.costs, evidence.storage_share
    if share is None or share < FROM_STORAGE or costs is None or not is_data_bound(evidence):
        return None
    least_waiting = MOST_OF_IT if cpus_are_full(evidence, machine) else SOME_WAITING
    if costs.cpu_share >= 1 - least_waiting:
        return None
    return finding(
        "storage-bound",
        f"{format_share(share)} of the bytes read come from storage, not from the page cache, and samples "
        f"wait {format_share(1 - costs.cpu_share)} of their time.",
        {
            "storage_share": share,
            "threshold_share": FROM_STORAGE,
            "cpu_share": costs.cpu_share,
            "read_bytes_per_sample": evidence.read_bytes_per_sample,
            "wait_share": evidence.wait_share,
        },
        severity="critical",
    )


def small_files_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Opening files takes longer than reading them."""
    opens, share = evidence.opens_per_sample, evidence.open_share
    if opens is None or share is None or not is_data_bound(evidence):
        return None
    size = evidence.read_bytes_per_sample
    small = size is None or size / max(opens, 1e-9) < SMALL_READ_BYTES
    sample_s = (evidence.worker_batch_s or 0.0) / (evidence.batch_size or 1)
    costly = opens >= SEVERAL_OPENS or (opens > 0 and share * sample_s / opens >= SLOW_OPEN_S)
    least = MANY_OPENS_SHARE if opens >= MANY_OPENS else MOST_OF_IT / FILE_FACTOR
    if share < least or not costly or not small:
        return None
    return finding(
        "small-files",
        f"A sample opens {opens:.1f} file(s): opening takes {format_share(share)} of its time, and "
        f"reading and closing small files about as much again.",
        {
            "opens_per_sample": opens,
            "open_share": share,
            "threshold_share": least,
            "read_bytes_per_sample": size,
            "wait_share": evidence.wait_share,
        },
        severity="critical",
        expected_gain=1 / (1 - share) if share < 1 else None,
    )


def copy_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """Copying batches to the device takes much of the step."""
    share = evidence.transfer_share
    if share is None or share < COPY_SHARE or not machine.accelerators:
        return None
    gain = 1 / (1 - share) if share < 1 else None
    return finding(
        "host-to-device",
        f"Copying batches to the device takes {format_share(share)} of the time.",
        {
            "transfer_share": share,
            "threshold_share": COPY_SHARE,
            "batch_bytes": evidence.batch_bytes,
            "pin_memory": evidence.pin_memory,
            "steps": evidence.steps,
        },
        severity="critical" if (gain or 1.0) > LARGE_GAIN else "warning",
        expected_gain=gain,
    )


def pickling_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """A start-up that is mostly sending the data set."""
    seconds, startup, workers = evidence.pickling_s, evidence.startup_s, evidence.num_workers
    if evidence.start_method in (None, "fork") or not workers or seconds is None or startup is None:
        return None
    sending = 2 * seconds * workers  # pickling here, unpickling there
    if sending < SLOW_PICKLING_SHARE * startup or sending < 0.5:
        return None
    return finding(
        "dataset-pickling",
        f"The first batch comes after {format_seconds(startup)}; about {format_seconds(sending)} of "
        f"it goes into sending the data set to {workers} workers.",
        {
            "pickling_s": seconds,
            "pickled_bytes": evidence.pickled_bytes,
            "startup_s": startup,
            "num_workers": workers,
            "start_method": evidence.start_method,
        },
    )


def slow_rank_rule(evidence: Evidence, machine: Machine) -> Finding | None:
    """One rank that waits for data while the others wait for it."""
    waits, period = evidence.rank_waits_s, evidence.period_s
    if waits is None or len(waits) < 2 or not period:
        return None
    slowest = max(range(len(waits)), key=lambda rank: waits[rank])
    others = sorted(wait for rank, wait in enumerate(waits) if rank != slowest)
    usual = others[len(others) // 2]
    lost = waits[slowest] - usual
    if lost < DATA_BOUND_SHARE * period or waits[slowest] < SLOW_RANK_FACTOR * usual:
        return None
    return finding(
        "slow-rank",
        f"Rank {slowest} waits {format_seconds(waits[slowest])} a step for its data, the others "
        f"{format_seconds(usual)}: every step is as slow as that rank.",
        {
            "rank": slowest,
            "rank_wait_s": waits[slowest],
            "others_wait_s": usual,
            "threshold_factor": SLOW_RANK_FACTOR,
            "ranks": len(waits),
            "period_s": period,
        },
        severity="critical",
        expected_gain=period / (period - lost) if lost < period else None,
    )


WORKER_RULES = (
    slow_rank_rule,
    straggler_rule,
    serialised_rule,
    thread_rule,
    quota_rule,
    storage_rule,
    cold_storage_rule,
    small_files_rule,
    copy_rule,
    pickling_rule,
)
