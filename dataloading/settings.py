"""What a `DataLoader` can be set to, and how to build the same loader again with other settings."""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from dataloading.arguments import check_int
from dataloading.results import Result
from dataloading.watchdog import loader_warnings_hidden

DEFAULT_PREFETCH_FACTOR = 2  # what DataLoader takes when workers are on and nothing is said
ONLY_WITH_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context")


@dataclass(frozen=True, repr=False)
class LoaderSettings(Result):
    """The settings of a `DataLoader` that change its speed or its memory.

    Args:
        num_workers: Worker processes; 0 loads in the training process.
        batch_size: Samples per batch; None keeps what the loader has.
        pin_memory: Copy each batch into page-locked memory.
        prefetch_factor: Batches each worker prepares ahead; None takes PyTorch's default (2).
        persistent_workers: Keep the workers between epochs.
        in_order: Deliver batches in sampler order.
        multiprocessing_context: "fork", "spawn" or "forkserver"; None takes the default.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: An option is out of range; the text names it.

    Example:
        >>> LoaderSettings(num_workers=0, prefetch_factor=4).kwargs()
        {'num_workers': 0, 'pin_memory': False, 'in_order': True}

    Explained in: notebook 00
    """

    num_workers: int = 0
    batch_size: int | None = None
    pin_memory: bool = False
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    in_order: bool = True
    multiprocessing_context: str | None = None

    def __post_init__(self) -> None:
        """Refuse what no `DataLoader` would take, before any worker starts."""
        check_int("num_workers", self.num_workers, least=0)
        check_int("batch_size", self.batch_size, least=1, optional=True)
        check_int("prefetch_factor", self.prefetch_factor, least=1, optional=True)
        methods = multiprocessing.get_all_start_methods()
        if self.multiprocessing_context not in (None, *methods):
            raise ValueError(
                f"multiprocessing_context={self.multiprocessing_context!r} is not a start method "
                f"of this platform; choose one of {methods} or None."
            )

    @classmethod
    def cleaned(cls, **wishes: Any) -> CleanedSettings:
        """Turn wishes into settings that a `DataLoader` accepts, and say what was dropped.

        Args:
            **wishes: Any of the fields of `LoaderSettings`.

        Returns:
            `(settings, dropped)`: `dropped` maps the name of each dropped option to the reason.

        Raises:
            TypeError: A wish is not a loader setting, or has the wrong type.
            ValueError: A value that no combination makes valid, such as `prefetch_factor=0`.

        Example:
            >>> LoaderSettings.cleaned(num_workers=0, prefetch_factor=4).dropped
            {'prefetch_factor': 'needs worker processes, and num_workers is 0'}
        """
        names = [field.name for field in fields(cls)]
        if unknown := [name for name in wishes if name not in names]:
            raise TypeError(f"{unknown[0]!r} is not a loader setting; the settings are {names}.")
        settings = cls(**wishes)
        neutral = cls()
        dropped = {}
        if settings.num_workers == 0:
            for name in ONLY_WITH_WORKERS:
                if getattr(settings, name) != getattr(neutral, name):
                    dropped[name] = "needs worker processes, and num_workers is 0"
        if not settings.in_order and "in_order" not in accepted_options():
            dropped["in_order"] = "this version of torch has no such option"
        return CleanedSettings(
            replace(settings, **{name: getattr(neutral, name) for name in dropped}), dropped
        )

    @classmethod
    def of(cls, dataloader: DataLoader) -> LoaderSettings:
        """Read the settings of a loader.

        Raises:
            TypeError: It is no `DataLoader`.
        """
        if not isinstance(dataloader, DataLoader):
            raise TypeError(
                f"Expected a torch.utils.data.DataLoader, got {type(dataloader).__name__}: only a "
                "DataLoader has such settings."
            )
        context = dataloader.multiprocessing_context
        prefetch = dataloader.prefetch_factor if dataloader.num_workers else None
        return cls(
            num_workers=int(dataloader.num_workers),  # a NumPy number, perhaps
            batch_size=dataloader.batch_size,
            pin_memory=bool(dataloader.pin_memory),
            prefetch_factor=int(prefetch) if prefetch is not None else None,
            persistent_workers=bool(dataloader.persistent_workers),
            in_order=getattr(dataloader, "in_order", True),
            multiprocessing_context=context.get_start_method() if context is not None else None,
        )

    @property
    def queued_batches(self) -> int:
        """Batches that the workers may hold ready: workers x prefetch factor."""
        return self.num_workers * (self.prefetch_factor or DEFAULT_PREFETCH_FACTOR)

    def changed(self, **changes: Any) -> LoaderSettings:
        """These settings with some changed, and without what has no effect then.

        Example:
            >>> LoaderSettings(num_workers=2, prefetch_factor=4).changed(num_workers=0)
            LoaderSettings: num_workers=0, pin_memory=False, in_order=True
        """
        present = {field.name: getattr(self, field.name) for field in fields(self)}
        return self.cleaned(**{**present, **changes}).settings

    def kwargs(self) -> dict[str, Any]:
        """Only the keyword arguments that `DataLoader` accepts for this combination and version."""
        settings = self.changed()
        accepted = accepted_options()
        return {
            name: value
            for name in (field.name for field in fields(self))
            if (value := getattr(settings, name)) is not None
            and name in accepted
            and (settings.num_workers > 0 or name not in ONLY_WITH_WORKERS)
        }

    def summary(self) -> str:
        """The settings as `DataLoader` would be given them."""
        return ", ".join(f"{name}={value!r}" for name, value in self.kwargs().items())


class CleanedSettings(NamedTuple):
    """Settings that `DataLoader` accepts, and what had to be dropped (name -> reason)."""

    settings: LoaderSettings
    dropped: dict[str, str]


def accepted_options() -> Mapping[str, inspect.Parameter]:
    """The keyword arguments of `DataLoader` in the installed version of torch."""
    return inspect.signature(DataLoader.__init__).parameters


def rebuild_dataloader(
    dataloader: DataLoader,
    settings: LoaderSettings,
    *,
    dataset: Dataset | None = None,
    collate_fn: Any = None,
    wrap_sampler: Callable[[Any], Any] | None = None,
) -> DataLoader:
    """Build a new loader with other settings, all else equal.

    The new loader shares the dataset, the sampler and the random generator with the old one; the
    old one is left as it is.

    Args:
        dataloader: The loader to take everything else from.
        settings: What the new loader is set to; `batch_size=None` keeps the batch size.
        dataset: A stand-in for the dataset (same length and order), for measuring.
        collate_fn: A stand-in for the collate function, for measuring.
        wrap_sampler: Put around the sampler or batch sampler, for measuring.

    Returns:
        A new `DataLoader` (or the same subclass, where it has the constructor of `DataLoader`).

    Raises:
        TypeError: The loader cannot be built again from its public attributes.
        ValueError: The batch size cannot change because a batch sampler or the dataset sets it.

    Example:
        >>> loader = DataLoader(range(8), batch_size=4, shuffle=True)
        >>> rebuild_dataloader(loader, LoaderSettings(batch_size=2)).batch_size
        2

    Explained in: notebook 09
    """
    if not isinstance(dataloader, DataLoader):
        raise TypeError(
            f"Expected a torch.utils.data.DataLoader, got {type(dataloader).__name__}: "
            "only a DataLoader can be built again with other settings."
        )
    if not isinstance(settings, LoaderSettings):
        raise TypeError(
            f"Expected LoaderSettings, got {type(settings).__name__}; write LoaderSettings(...)."
        )
    kind = type(dataloader)
    if kind.__init__ is not DataLoader.__init__:
        raise TypeError(
            f"{kind.__name__} has a constructor of its own, so it cannot be built again with other "
            "settings; build it yourself with the settings given, or use a plain DataLoader."
        )
    options = settings.kwargs()
    options.pop("batch_size", None)
    options |= _batching(dataloader, settings.batch_size)
    for name in ("sampler", "batch_sampler"):
        if wrap_sampler is not None and name in options:
            options[name] = wrap_sampler(options[name])
    options |= {
        "collate_fn": collate_fn or dataloader.collate_fn,
        "worker_init_fn": dataloader.worker_init_fn,
        "generator": dataloader.generator,
        "timeout": dataloader.timeout if settings.num_workers else 0,
    }
    if device := getattr(dataloader, "pin_memory_device", ""):
        options["pin_memory_device"] = device
    with loader_warnings_hidden():  # the settings are chosen; torch would only count CPUs
        return kind(dataloader.dataset if dataset is None else dataset, **options)


def ineffective_options(dataloader: Any) -> dict[str, str]:
    """Options of a loader that were set and have no effect: name -> reason.

    Example:
        >>> ineffective_options(DataLoader(range(4), worker_init_fn=print))
        {'worker_init_fn': 'runs in worker processes, and num_workers is 0'}
    """
    if not isinstance(dataloader, DataLoader):
        return {}
    found = {}
    if dataloader.num_workers == 0:
        if dataloader.worker_init_fn is not None:
            found["worker_init_fn"] = "runs in worker processes, and num_workers is 0"
        if not getattr(dataloader, "in_order", True):
            found["in_order"] = "orders worker processes, and num_workers is 0"
        if dataloader.timeout > 0:
            found["timeout"] = "limits worker processes, and num_workers is 0"
    elif dataloader.num_workers == 1 and not getattr(dataloader, "in_order", True):
        found["in_order"] = "a single worker delivers in order anyway"
    if getattr(dataloader, "pin_memory_device", "") and not dataloader.pin_memory:
        found["pin_memory_device"] = "needs pin_memory=True"
    return found


def _batching(dataloader: DataLoader, batch_size: int | None) -> dict[str, Any]:
    """The arguments that say which samples come together in a batch."""
    wanted = batch_size or dataloader.batch_size
    if dataloader.batch_size is None:
        if batch_size is not None:
            maker = "its batch sampler" if dataloader.batch_sampler is not None else "its dataset"
            raise ValueError(
                f"batch_size={batch_size} cannot be set: {maker} decides what comes together in a "
                "batch. Leave batch_size None, or change it there."
            )
        if dataloader.batch_sampler is not None:
            return {"batch_sampler": dataloader.batch_sampler}
        if isinstance(dataloader.dataset, IterableDataset):
            return {"batch_size": None}
        return {"batch_size": None, "sampler": dataloader.sampler}
    if isinstance(dataloader.dataset, IterableDataset):
        return {"batch_size": wanted, "drop_last": dataloader.drop_last}
    if type(dataloader.batch_sampler) is not BatchSampler:
        raise TypeError(
            f"The batch sampler {type(dataloader.batch_sampler).__name__} was put in place after "
            "the loader was built, so the loader cannot be built again; pass it as batch_sampler=."
        )
    return {
        "batch_size": wanted,
        "sampler": dataloader.sampler,
        "drop_last": dataloader.drop_last,
    }
