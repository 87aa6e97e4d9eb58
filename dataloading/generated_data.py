"""Images in the place of the course's data sets: same shapes and classes, and something to learn.

A class is told by its colours, so that a small model gets better than chance within seconds. What
it reaches says nothing about the real data.
"""

from __future__ import annotations

import colorsys
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from PIL import Image

Transform = Callable[[Any], Any] | None

CIFAR10_CLASSES = [
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
]
FASHION_MNIST_CLASSES = [
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
]
FOODS = """
apple_pie baby_back_ribs baklava beef_carpaccio beef_tartare beet_salad beignets bibimbap
bread_pudding breakfast_burrito bruschetta caesar_salad cannoli caprese_salad carrot_cake ceviche
cheese_plate cheesecake chicken_curry chicken_quesadilla chicken_wings chocolate_cake
chocolate_mousse churros clam_chowder club_sandwich crab_cakes creme_brulee croque_madame cup_cakes
deviled_eggs donuts dumplings edamame eggs_benedict escargots falafel filet_mignon fish_and_chips
foie_gras french_fries french_onion_soup french_toast fried_calamari fried_rice frozen_yogurt
garlic_bread gnocchi greek_salad grilled_cheese_sandwich grilled_salmon guacamole gyoza hamburger
hot_and_sour_soup hot_dog huevos_rancheros hummus ice_cream lasagna lobster_bisque
lobster_roll_sandwich macaroni_and_cheese macarons miso_soup mussels nachos omelette onion_rings
oysters pad_thai paella pancakes panna_cotta peking_duck pho pizza pork_chop poutine prime_rib
pulled_pork_sandwich ramen ravioli red_velvet_cake risotto samosa sashimi scallops seaweed_salad
shrimp_and_grits spaghetti_bolognese spaghetti_carbonara spring_rolls steak strawberry_shortcake
sushi tacos takoyaki tiramisu tuna_tartare waffles
"""
FOOD101_CLASSES = FOODS.split()

ARRAYS = {  # shape of one image as torchvision keeps it, and the classes
    "cifar10": ((32, 32, 3), CIFAR10_CLASSES),
    "fashion_mnist": ((28, 28), FASHION_MNIST_CLASSES),
}
BLOCKS = 4  # a class is a pattern of 4 x 4 blocks
HALF_RANGE = 128  # of a pixel's 256 values, half is the pattern of the class and half is noise
FOOD101_VERSION = 1  # raise it when the same arguments would give other photos
TABLES, PLATES = 10, 11  # colours around and in the middle of a photo: enough for 101 classes
TINT = 0.4  # share of the colours of the class in a photo


class GeneratedImages(Dataset):
    """Images made here, with the items and attributes of torchvision's `CIFAR10` or `FashionMNIST`.

    Args:
        name: `"cifar10"` or `"fashion_mnist"`.
        train: The training images, or else the test images.
        images: Number of images, dealt out to the classes in turn and shuffled.
        seed: Fixes every image; what the classes look like stays the same with any seed.
        transform: Called with the PIL image.
        target_transform: Called with the class number.

    Attributes:
        data: uint8, `[images, 32, 32, 3]` as an array or `[images, 28, 28]` as a tensor.
        targets: Class numbers, as a list or an int64 tensor.
        classes: Class names.
        class_to_idx: Class number of each name.

    Example:
        >>> image, label = GeneratedImages("cifar10", train=True, images=10)[0]
        >>> image.size, image.mode
        ((32, 32), 'RGB')

    Explained in: notebook 00
    """

    is_generated = True
    source = "generated"

    def __init__(
        self,
        name: str,
        *,
        train: bool,
        images: int,
        seed: int = 0,
        transform: Transform = None,
        target_transform: Transform = None,
    ) -> None:
        shape, classes = ARRAYS[name]
        rng = np.random.default_rng([seed, int(train)])
        targets = rng.permutation(images) % len(classes)
        data = rng.integers(0, HALF_RANGE, (images, *shape), dtype=np.uint8)
        data += _class_patterns(len(classes), shape)[targets]
        self.name = name
        self.train = train
        self.data: Any = data
        self.targets: Any = targets.tolist()
        if name == "fashion_mnist":
            self.data, self.targets = torch.from_numpy(data), torch.tensor(self.targets)
        self.classes = list(classes)
        self.class_to_idx = {label: number for number, label in enumerate(classes)}
        self.transform = transform
        self.target_transform = target_transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        from PIL import Image

        image: Any = Image.fromarray(np.asarray(self.data[index]))
        target: Any = int(self.targets[index])
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target

    def __repr__(self) -> str:
        part = "train" if self.train else "test"
        return f"GeneratedImages({self.name!r}, {part}, {len(self)} images, not the real data)"


def _class_patterns(classes: int, shape: tuple[int, ...]) -> np.ndarray:
    """A coarse pattern for each class, uint8 `[classes, *shape]`, the same in every run."""
    coarse = np.random.default_rng(0).integers(
        0, HALF_RANGE, (classes, BLOCKS, BLOCKS, *shape[2:]), dtype=np.uint8
    )
    return coarse.repeat(shape[0] // BLOCKS, axis=1).repeat(shape[1] // BLOCKS, axis=2)


def generate_food101(root: Path, *, train: bool, images: int, seed: int = 0) -> Path:
    """Make JPEG photos of 512 x 512 pixels, about 50 kB each, in the layout of Food-101.

    Photos made by an earlier call are used again. They appear when all are complete, so that
    several processes may make them at once.

    Args:
        root: Folder of the data sets; the photos go below `root/food101-generated`.
        train: The training photos, or else the test photos.
        images: Number of photos, dealt out to the 101 classes in turn.
        seed: Fixes every photo; what the classes look like stays the same with any seed.

    Returns:
        A folder to give to `torchvision.datasets.Food101` as its `root`.

    Explained in: notebook 00
    """
    from dataloading.sample_images import create_sample_images

    part = "train" if train else "test"
    home = root / "food101-generated"
    folder = home / f"{part}-{images}-seed{seed}-v{FOOD101_VERSION}"
    if folder.is_dir():
        return folder
    print(f"[INFO] Making {images} photos in {folder}...")
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=home) as workplace:
        made = Path(workplace, "made")
        photos = create_sample_images(
            Path(workplace, "photos"),
            images=images,
            classes=min(images, len(FOOD101_CLASSES)),
            seed=2 * seed + int(train),
        )
        _write_food101(photos, made / "food-101", part)
        try:
            os.replace(made, folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same photos
                raise
    return folder


def _write_food101(photos: Path, folder: Path, part: str) -> None:
    """Colour the photos by class into `folder/images`, and list them in `folder/meta`."""
    from PIL import Image

    listed: dict[str, list[str]] = {name: [] for name in FOOD101_CLASSES}
    for file in sorted(photos.glob("class_*/*.jpg")):
        label = int(file.parent.name.removeprefix("class_"))
        name = FOOD101_CLASSES[label]
        target = folder / "images" / name / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(file) as photo:
            _coloured(photo, label).save(target, quality=92)  # as many bytes as before
        listed[name].append(f"{name}/{file.stem}")
    (folder / "meta").mkdir()
    text = json.dumps(listed)
    (folder / "meta" / f"{part}.json").write_text(text, encoding="utf-8")


def _coloured(photo: Image.Image, label: int) -> Image.Image:
    """The photo behind a plate on a table, whose two colours tell the class."""
    from PIL import Image, ImageDraw

    table, plate = divmod(label, PLATES)
    width, height = photo.size
    colours = Image.new("RGB", photo.size, _colour(table / TABLES))
    box = (width // 5, height // 5, width - width // 5, height - height // 5)
    ImageDraw.Draw(colours).ellipse(box, fill=_colour(plate / PLATES))
    return Image.blend(photo, colours, TINT)


def _colour(hue: float) -> tuple[int, int, int]:
    red, green, blue = colorsys.hsv_to_rgb(hue, 1.0, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)
