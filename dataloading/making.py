"""A loader with other settings, whoever builds it: `rebuild_dataloader`, or the user's own function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from dataloading.arguments import check_loader
from dataloading.settings import LoaderSettings, rebuild_dataloader

MakeDataLoader = Callable[[LoaderSettings], Any]


@dataclass(frozen=True)
class Maker:
    """Builds a loader for any settings.

    Attributes:
        present: The loader as it is now.
        settings: Its settings.
        make: Gives a loader for other settings.
    """

    present: DataLoader
    settings: LoaderSettings
    make: MakeDataLoader

    @classmethod
    def of(cls, dataloader: DataLoader | MakeDataLoader, name: str = "dataloader") -> Maker:
        """From a loader, or from a function that takes `LoaderSettings` and gives a loader.

        Raises:
            TypeError: Neither of them, or a loader that cannot be built again; the text says why
                and that a function helps.
        """
        if isinstance(dataloader, DataLoader):
            settings = LoaderSettings.of(dataloader)
            try:
                rebuild_dataloader(dataloader, settings)
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"{error} Or pass a function make_dataloader(settings) that builds the loader "
                    "with DataLoader(..., **settings.kwargs())."
                ) from error
            return cls(dataloader, settings, lambda wanted: rebuild_dataloader(dataloader, wanted))
        if not callable(dataloader) or isinstance(dataloader, type):
            check_loader(dataloader, name)
            raise TypeError(
                f"{name} is a {type(dataloader).__name__}, which cannot be built again with other "
                "settings; expected a DataLoader, or a function make_dataloader(settings)."
            )
        present = _made(dataloader, LoaderSettings())
        # the function has the batch size, until somebody asks for another one
        settings = LoaderSettings.of(present).changed(batch_size=None)
        return cls(present, settings, lambda wanted: _made(dataloader, wanted))


def _made(make: MakeDataLoader, settings: LoaderSettings) -> DataLoader:
    """What the user's function gives, refused where it is no loader or does not do as it is told."""
    name = getattr(make, "__name__", type(make).__name__)
    try:
        loader = make(settings)
    except TypeError as error:
        if "multiple values for keyword argument" not in str(error):
            raise
        raise TypeError(
            f"{name}(settings): {error}. The settings come last and win: DataLoader(dataset, "
            "**{'batch_size': 32, **settings.kwargs()})."
        ) from error
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"{name}(settings) must return a DataLoader, and returned {type(loader).__name__}."
        )
    if loader.num_workers != settings.num_workers:
        raise ValueError(
            f"{name}(settings) returned a loader with num_workers={loader.num_workers} where "
            f"{settings.num_workers} were asked for; build it with DataLoader(..., "
            "**settings.kwargs())."
        )
    return loader
