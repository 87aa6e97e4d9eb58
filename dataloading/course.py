"""The nine helpers of the Learn PyTorch course, with the same names, arguments and printed texts.

`helper_functions.py` can take the place of theirs. What ours do better: a model comes back on the
device and in the mode it was given in, and a failed download leaves no half-made folder behind.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

DATA_FOLDER = Path("data")  # the course keeps all its data below this folder
DOWNLOAD_TIMEOUT_S = 20  # longest silence of a server before we give up
URL_CHARACTERS = "!#$%&'()*+,/:;=?@[]~"  # kept as they are; spaces and accents get encoded
USER_AGENT = "Mozilla/5.0 (dataloading-course)"  # some servers refuse Python's own name

# `device_count` asks the driver's monitoring library, where `is_available` would start CUDA: after
# that, a forked process could no longer use the GPU.
DEFAULT_DEVICE = "cuda" if torch.cuda.device_count() else "cpu"


# ------------------------------------------------------------------------------------ look at data


def walk_through_dir(dir_path: str | Path) -> None:
    """Print how many folders and files each folder below `dir_path` holds, in sorted order.

    Args:
        dir_path: Folder to start from.

    Raises:
        FileNotFoundError: There is no folder at `dir_path`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     walk_through_dir(folder)  # doctest: +ELLIPSIS
        There are 0 directories and 0 images in '...'.

    Explained in: notebook 00
    """
    if not os.path.isdir(dir_path):
        raise FileNotFoundError(f"There is no folder at {os.path.abspath(dir_path)}.")
    for folder, subfolders, files in os.walk(dir_path):
        subfolders.sort()
        print(f"There are {len(subfolders)} directories and {len(files)} images in '{folder}'.")


def download_data(source: str, destination: str, remove_source: bool = True) -> Path:
    """Download a zip file and unpack it into `data/destination`, all or nothing.

    The folder appears only when every file in it is complete, so an interrupted download starts
    again next time. A folder that exists is left as it is.

    Args:
        source: Address of a zip file (`https:`, `http:` or `file:`), or its path on this machine.
        destination: Name of the folder below `data/`.
        remove_source: Drop the downloaded zip file; else it stays in `data/`.

    Returns:
        `Path("data") / destination`.

    Raises:
        ConnectionError: The server did not answer, refused, or sent only a part.
        ValueError: What came is not a zip file, or one of its files would land outside the folder.

    Example:
        >>> download_data("https://example.com/photos.zip", "photos")  # doctest: +SKIP
        PosixPath('data/photos')

    Explained in: notebook 00
    """
    folder = DATA_FOLDER / destination
    if folder.is_dir():
        print(f"[INFO] {folder} directory exists, skipping download.")
        return folder
    print(f"[INFO] Did not find {folder} directory, creating one...")
    if os.path.isfile(source):
        address = Path(source).resolve().as_uri()
    else:
        address = urllib.parse.quote(source, safe=URL_CHARACTERS)
    file_name = Path(urllib.parse.unquote(urllib.parse.urlsplit(address).path)).name or "data.zip"

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder.parent) as workplace:
        archive, unpacked = Path(workplace, "archive.zip"), Path(workplace, "unpacked")
        print(f"[INFO] Downloading {file_name} from {source}...")
        _download(address, archive)
        print(f"[INFO] Unzipping {file_name} data...")
        try:
            _unzip(archive, unpacked)
        except ValueError as error:
            raise ValueError(f"Cannot use {source}: {error} Nothing was kept.") from error
        if not remove_source:
            os.replace(archive, DATA_FOLDER / file_name)
        try:
            os.replace(unpacked, folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same files
                raise
    return folder


def _download(address: str, target: Path) -> None:
    """Write what `address` delivers to `target`; a part of it is an error."""
    request = urllib.request.Request(address, headers={"User-Agent": USER_AGENT})
    try:
        with urllib.request.urlopen(request, timeout=DOWNLOAD_TIMEOUT_S) as response:
            with open(target, "wb") as file:
                shutil.copyfileobj(response, file)
            promised = response.headers.get("Content-Length")
    except (
        urllib.error.URLError,  # includes HTTP errors such as 404
        http.client.HTTPException,
        ConnectionError,
        TimeoutError,
    ) as error:
        raise ConnectionError(
            f"Could not download {address}: {error}. Check the address and the connection, then "
            "call again; nothing was kept."
        ) from error
    received = target.stat().st_size
    if promised is not None and received != int(promised):
        raise ConnectionError(
            f"The download of {address} stopped after {received:,} of {int(promised):,} bytes. "
            "Call again; nothing was kept."
        )


def _unzip(archive: Path, folder: Path) -> None:
    """Unpack `archive` into the new `folder`, refusing names that point outside of it."""
    try:
        with zipfile.ZipFile(archive) as content:
            for name in content.namelist():
                parts = name.replace("\\", "/").split("/")
                if parts[0] == "" or parts[0][1:2] == ":" or ".." in parts:
                    raise ValueError(
                        f"The zip file has a member {name!r}, which would land outside the folder "
                        "it is unpacked to: refused. Take the data from another source."
                    )
            folder.mkdir()
            content.extractall(folder)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(
            f"What came is not a complete zip file ({error}). If the address shows a web page, use "
            "that of the file itself (on GitHub: the 'raw' link)."
        ) from error


# ------------------------------------------------------------------------------------------ models


@contextlib.contextmanager
def _predicting(model: nn.Module, device: Any = None) -> Iterator[None]:
    """Evaluation mode without gradients, on `device`; afterwards all is as it was."""
    home = next((parameter.device for parameter in model.parameters()), None)
    modes = [(module, module.training) for module in model.modules()]
    try:
        if device is not None:
            model.to(device)
        model.eval()
        with torch.inference_mode():
            yield
    finally:
        for module, training in modes:  # one by one: a frozen layer stays frozen
            module.training = training
        if device is not None and home is not None:
            model.to(home)


def plot_decision_boundary(model: nn.Module, X: torch.Tensor, y: torch.Tensor) -> None:
    """Colour the plane by the class that `model` predicts, and draw the points on top.

    Draws on the current axes. The model stays on its device and keeps its mode.

    Args:
        model: Takes `(points, 2)`; gives one logit per point (two classes) or one per class.
        X: Points, shape `(points, 2)`.
        y: Class of each point, shape `(points,)`.

    Example:
        >>> points, classes = torch.randn(9, 2), torch.arange(9) % 3
        >>> plot_decision_boundary(nn.Linear(2, 3), points, classes)  # doctest: +SKIP

    Explained in: notebook 00
    """
    import matplotlib.pyplot as plt

    points, labels = _to_numpy(X), _to_numpy(y)
    (x_min, y_min), (x_max, y_max) = points.min(axis=0) - 0.1, points.max(axis=0) + 0.1
    xx, yy = np.meshgrid(np.linspace(x_min, x_max, 101), np.linspace(y_min, y_max, 101))
    grid = torch.from_numpy(np.column_stack((xx.ravel(), yy.ravel()))).float()

    parameter = next(model.parameters(), grid)
    with _predicting(model):
        logits = model(grid.to(parameter.device, parameter.dtype)).float().cpu()
    several_classes = logits.ndim > 1 and logits.shape[-1] > 1
    predicted = logits.argmax(dim=-1) if several_classes else torch.round(torch.sigmoid(logits))

    plt.contourf(xx, yy, predicted.reshape(xx.shape).numpy(), cmap="RdYlBu", alpha=0.7)
    plt.scatter(points[:, 0], points[:, 1], c=labels, s=40, cmap="RdYlBu")
    plt.xlim(xx.min(), xx.max())
    plt.ylim(yy.min(), yy.max())


def pred_and_plot_image(
    model: nn.Module,
    image_path: str | Path,
    class_names: Sequence[str] | None = None,
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None,
    device: torch.device | str = DEFAULT_DEVICE,
) -> None:
    """Predict the class of one image file and show the image with the prediction as its title.

    Draws on the current axes. The model comes back on the device and in the mode it was given in.

    Args:
        model: Takes `(1, channels, height, width)` and gives logits `(1, classes)`.
        image_path: The image file.
        class_names: Name of each class; without it the title gives the number.
        transform: Applied to the image as float32 in [0, 1], shape `(channels, height, width)`.
        device: Where to predict.

    Raises:
        OSError: The file is missing or is no image.

    Example:
        >>> pred_and_plot_image(model, "pizza.jpg", ["pizza", "steak"])  # doctest: +SKIP

    Explained in: notebook 00
    """
    import matplotlib.pyplot as plt

    image = _read_image(image_path).type(torch.float32) / 255.0
    if transform:
        image = transform(image)

    with _predicting(model, device):
        probabilities = torch.softmax(model(image.unsqueeze(dim=0).to(device)), dim=1).cpu()
    label = int(probabilities.argmax(dim=1))

    plt.imshow(
        image.permute(1, 2, 0).numpy(), cmap="gray"
    )  # the colour map is for one channel only
    name = class_names[label] if class_names else label
    plt.title(f"Pred: {name} | Prob: {probabilities.max():.3f}")
    plt.axis(False)


def _read_image(path: str | Path) -> torch.Tensor:
    """An image file as uint8, `(channels, height, width)`, with the channels that it has.

    The same as `torchvision.io.read_image`, which is deprecated since torchvision 0.29.
    """
    from PIL import Image

    with Image.open(path) as file:
        image = file if file.mode in ("L", "RGB", "RGBA") else file.convert("RGB")
        pixels = np.array(image)
    return torch.from_numpy(pixels).reshape(*pixels.shape[:2], -1).permute(2, 0, 1)


def accuracy_fn(y_true: torch.Tensor, y_pred: torch.Tensor) -> float:
    """Share of right predictions, in percent.

    Args:
        y_true: Labels.
        y_pred: Predicted labels, of the same shape.

    Returns:
        Accuracy between 0 and 100.

    Raises:
        ValueError: The shapes differ (they would broadcast to a wrong figure), or are empty.

    Example:
        >>> accuracy_fn(torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1, 0, 0]))
        75.0

    Explained in: notebook 00
    """
    if y_true.shape != y_pred.shape or y_pred.numel() == 0:
        raise ValueError(
            f"y_true has shape {tuple(y_true.shape)} and y_pred {tuple(y_pred.shape)}: "
            "give labels of equal, non-empty shape (squeeze, or argmax over the classes, first)."
        )
    correct = torch.eq(y_true, y_pred).sum().item()
    return (correct / y_pred.numel()) * 100


def set_seeds(seed: int = 42) -> None:
    """Seed PyTorch's random numbers on the CPU and on every accelerator.

    Args:
        seed: Any whole number.

    Example:
        >>> set_seeds(0)
        >>> torch.rand(1)
        tensor([0.4963])

    Explained in: notebook 00
    """
    torch.manual_seed(seed)  # also seeds every GPU


def print_train_time(start: float, end: float, device: Any = None) -> float:
    """Print and return the time between two clock readings.

    Args:
        start: Reading before, in seconds (`timeit.default_timer()`).
        end: Reading after.
        device: Named in the text.

    Returns:
        Seconds between the two.

    Example:
        >>> print_train_time(1.0, 3.5, device="cpu")
        <BLANKLINE>
        Train time on cpu: 2.500 seconds
        2.5

    Explained in: notebook 00
    """
    total_time = end - start
    print(f"\nTrain time on {device}: {total_time:.3f} seconds")
    return total_time


# ---------------------------------------------------------------------------------------- pictures


def plot_predictions(
    train_data: Any, train_labels: Any, test_data: Any, test_labels: Any, predictions: Any = None
) -> None:
    """Scatter training points, test points and (if given) predictions in a new 10 x 7 figure.

    Args:
        train_data: x of the training points (tensor on any device, array or list).
        train_labels: y of the training points.
        test_data: x of the test points.
        test_labels: y of the test points.
        predictions: Predicted y of the test points.

    Example:
        >>> plot_predictions([1, 2], [1, 2], [3], [3], predictions=[2.9])  # doctest: +SKIP

    Explained in: notebook 00
    """
    import matplotlib.pyplot as plt

    plt.figure(figsize=(10, 7))
    clouds = [
        (train_data, train_labels, "b", "Training data"),
        (test_data, test_labels, "g", "Testing data"),
        (test_data, predictions, "r", "Predictions"),
    ]
    for x, y, color, label in clouds:
        if y is not None:
            plt.scatter(_to_numpy(x), _to_numpy(y), c=color, s=4, label=label)
    plt.legend(prop={"size": 14})


def plot_loss_curves(results: Mapping[str, Sequence[float]]) -> None:
    """Draw loss and accuracy over the epochs, training against test, in a new figure.

    Args:
        results: Lists of one value an epoch under the keys `train_loss`, `train_acc`, `test_loss`
            and `test_acc`.

    Raises:
        KeyError: One of the four keys is missing.

    Example:
        >>> keys = ("train_loss", "train_acc", "test_loss", "test_acc")
        >>> plot_loss_curves(dict.fromkeys(keys, [0.5, 0.4]))  # doctest: +SKIP

    Explained in: notebook 00
    """
    import matplotlib.pyplot as plt

    curves = {
        key: [float(value) for value in results[key]]
        for key in ("train_loss", "test_loss", "train_acc", "test_acc")
    }
    plt.figure(figsize=(15, 7))
    for position, (title, ending) in enumerate([("Loss", "loss"), ("Accuracy", "acc")], start=1):
        plt.subplot(1, 2, position)
        for part in ("train", "test"):
            values = curves[f"{part}_{ending}"]
            plt.plot(range(len(values)), values, label=f"{part}_{title.lower()}")
        plt.title(title)
        plt.xlabel("Epochs")
        plt.legend()


def _to_numpy(values: Any) -> np.ndarray:
    """A tensor from any device, an array or a list, as an array."""
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().numpy()
    return np.asarray(values)
