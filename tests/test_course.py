"""The nine helpers of the Learn PyTorch course: same calls, same texts, fewer surprises."""

import doctest
import http.server
import inspect
import io
import threading
import time
import warnings
import zipfile

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from dataloading import course

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SIGNATURES = {
    "walk_through_dir": "(dir_path)",
    "plot_decision_boundary": "(model, X, y)",
    "plot_predictions": "(train_data, train_labels, test_data, test_labels, predictions=None)",
    "accuracy_fn": "(y_true, y_pred)",
    "print_train_time": "(start, end, device=None)",
    "plot_loss_curves": "(results)",
    "pred_and_plot_image": (
        f"(model, image_path, class_names=None, transform=None, device='{DEVICE}')"
    ),
    "set_seeds": "(seed=42)",
    "download_data": "(source, destination, remove_source=True)",
}


@pytest.fixture(autouse=True)
def settings_of_matplotlib_stay():
    before = dict(matplotlib.rcParams)
    yield
    plt.close("all")
    assert dict(matplotlib.rcParams) == before


def without_annotations(function):
    signature = inspect.signature(function)
    parameters = [
        p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()
    ]
    return str(inspect.Signature(parameters))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_that_of_the_course(name):
    assert without_annotations(getattr(course, name)) == SIGNATURES[name]


def test_docstring_examples():
    assert doctest.testmod(course).failed == 0


# ------------------------------------------------------------------------------------ small helpers


def test_walk_through_dir_prints_a_line_per_folder(tmp_path, capsys):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "1.jpg").touch()
    assert course.walk_through_dir(tmp_path) is None
    assert capsys.readouterr().out.splitlines() == [
        f"There are 2 directories and 0 images in '{tmp_path}'.",
        f"There are 0 directories and 1 images in '{tmp_path / 'a'}'.",
        f"There are 0 directories and 0 images in '{tmp_path / 'b'}'.",
    ]


def test_walk_through_dir_names_a_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder at .*nowhere"):
        course.walk_through_dir(tmp_path / "nowhere")


def test_accuracy_is_in_percent():
    right = torch.tensor([1, 0, 2, 2])
    assert course.accuracy_fn(y_true=right, y_pred=torch.tensor([1, 0, 2, 0])) == 75.0
    assert isinstance(course.accuracy_fn(right, right), float)


def test_accuracy_refuses_shapes_that_would_broadcast():
    labels = torch.tensor([0, 1, 1])
    with pytest.raises(ValueError, match=r"\(3,\) and y_pred \(3, 1\)"):
        course.accuracy_fn(labels, labels.unsqueeze(1))
    with pytest.raises(ValueError, match="non-empty"):
        course.accuracy_fn(labels[:0], labels[:0])


def test_print_train_time(capsys):
    assert course.print_train_time(2.0, 3.25, device="cuda") == 1.25
    assert course.print_train_time(2.0, 3.25) == 1.25
    printed = "\nTrain time on cuda: 1.250 seconds\n\nTrain time on None: 1.250 seconds\n"
    assert capsys.readouterr().out == printed


def test_set_seeds_repeats_and_differs():
    course.set_seeds()
    first = torch.rand(3)
    course.set_seeds(42)
    assert torch.equal(torch.rand(3), first)
    course.set_seeds(43)
    assert not torch.equal(torch.rand(3), first)


# ----------------------------------------------------------------------------------------- pictures


def test_plot_predictions_draws_what_it_is_given():
    x = torch.arange(4.0)
    course.plot_predictions(x, x, x, x)
    assert len(plt.gca().collections) == 2
    assert plt.gcf().get_size_inches().tolist() == [10, 7]
    course.plot_predictions(x, x, x, x, predictions=x.clone().requires_grad_())
    labels = [text.get_text() for text in plt.gca().get_legend().get_texts()]
    assert labels == ["Training data", "Testing data", "Predictions"]
    assert len(plt.get_fignums()) == 2  # each call makes a figure


def test_plot_loss_curves_draws_four_curves():
    results = {
        "train_loss": [1.0, 0.5],
        "test_loss": [1.1, 0.7],
        "train_acc": [0.5, torch.tensor(0.75)],
        "test_acc": [0.4, 0.6],
    }
    assert course.plot_loss_curves(results) is None
    loss, accuracy = plt.gcf().axes
    assert [line.get_label() for line in loss.lines] == ["train_loss", "test_loss"]
    assert [line.get_label() for line in accuracy.lines] == ["train_accuracy", "test_accuracy"]
    assert list(accuracy.lines[0].get_ydata()) == [0.5, 0.75]
    assert (loss.get_title(), accuracy.get_title()) == ("Loss", "Accuracy")
    assert loss.get_xlabel() == "Epochs"


def partly_frozen_model(inputs, outputs):
    model = nn.Sequential(nn.Linear(inputs, 4), nn.BatchNorm1d(4), nn.Linear(4, outputs))
    model.train()
    model[1].eval()
    return model


def modes(model):
    return [module.training for module in model.modules()]


@pytest.mark.parametrize(("outputs", "classes"), [(1, 2), (2, 2), (3, 3)])
def test_decision_boundary_draws_and_puts_the_model_back(outputs, classes):
    model = partly_frozen_model(2, outputs)
    before = modes(model)
    figure, axes = plt.subplots(1, 2)
    X = torch.tensor([[0.0, 1.0], [2.0, 5.0], [1.0, 3.0]], requires_grad=True)
    course.plot_decision_boundary(model, X, torch.arange(3) % classes)
    assert modes(model) == before
    assert axes[1].get_xlim() == pytest.approx((-0.1, 2.1))  # the current axes, not new ones
    assert axes[1].get_ylim() == pytest.approx((0.9, 5.1))
    assert axes[1].collections
    assert plt.get_fignums() == [figure.number]


def test_decision_boundary_is_where_the_model_says():
    class RightHalf(nn.Module):  # no parameters at all
        def forward(self, points):
            return points[:, 0] - 0.5

    X = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    course.plot_decision_boundary(RightHalf(), X, torch.tensor([0, 1]))
    assert plt.gca().collections
    with pytest.MonkeyPatch.context() as patch:
        seen = {}
        patch.setattr(plt, "contourf", lambda xx, yy, z, **_: seen.update(xx=xx, z=z))
        course.plot_decision_boundary(RightHalf(), X, torch.tensor([0, 1]))
    assert np.array_equal(seen["z"] == 1, seen["xx"].astype("float32") > 0.5)


def test_decision_boundary_takes_double_precision():
    model = nn.Linear(2, 1).double()
    course.plot_decision_boundary(model, torch.rand(4, 2).double(), torch.arange(4) % 2)
    assert model.weight.dtype == torch.float64


def test_modes_come_back_after_an_error():
    model = partly_frozen_model(5, 1)  # wants five features, gets two
    before = modes(model)
    with pytest.raises(RuntimeError):
        course.plot_decision_boundary(model, torch.rand(4, 2), torch.arange(4) % 2)
    assert modes(model) == before


class MostRed(nn.Module):
    """One logit per colour channel: the mean of the channel."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.seen_training = None

    def forward(self, images):
        self.seen_training = self.training
        return images.mean(dim=(2, 3)) * self.scale


@pytest.fixture
def blue_image(tmp_path):
    path = tmp_path / "blue.png"
    Image.new("RGB", (6, 4), (0, 0, 255)).save(path)
    return path


def test_pred_and_plot_image_title_and_model(blue_image):
    model = MostRed()
    plt.figure()
    names = ["red", "green", "blue"]
    assert course.pred_and_plot_image(model, str(blue_image), names, device="cpu") is None
    probability = torch.softmax(torch.tensor([0.0, 0.0, 1.0]), dim=0).max()
    assert plt.gca().get_title() == f"Pred: blue | Prob: {probability:.3f}"
    assert plt.gca().images[0].get_array().shape == (4, 6, 3)
    assert not plt.gca().axison
    assert model.seen_training is False
    assert model.training


def test_pred_and_plot_image_transform_and_no_names(blue_image):
    seen = []

    def transform(image):
        seen.append(image)
        return image.flip(0)  # blue becomes red

    course.pred_and_plot_image(MostRed(), blue_image, transform=transform, device="cpu")
    assert plt.gca().get_title().startswith("Pred: 0 | Prob: 0.")
    assert seen[0].dtype == torch.float32
    assert seen[0].max() == 1.0


def test_pred_and_plot_image_takes_grey_images(tmp_path):
    path = tmp_path / "grey.png"
    Image.new("L", (6, 4), 100).save(path)
    course.pred_and_plot_image(MostRed(), path, device="cpu")
    assert plt.gca().get_title() == "Pred: 0 | Prob: 1.000"


def test_pred_and_plot_image_puts_the_model_back_on_its_device(blue_image):
    class Noting(MostRed):
        def to(self, device):
            self.moves = [*getattr(self, "moves", []), str(device)]
            return self

    model = Noting()
    course.pred_and_plot_image(model, blue_image, device="cpu")
    assert model.moves == ["cpu", "cpu"]  # there, and home again

    class Failing(Noting):
        def forward(self, images):
            raise RuntimeError("out of memory")

    model = Failing()
    with pytest.raises(RuntimeError, match="out of memory"):
        course.pred_and_plot_image(model, blue_image, device="cpu")
    assert model.moves == ["cpu", "cpu"]
    assert model.training


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_images_are_read_as_torchvision_reads_them(tmp_path, mode):
    read_image = pytest.importorskip("torchvision.io").read_image
    noise = np.random.default_rng(0).integers(
        0, 256, (9, 7, len(Image.new(mode, (1, 1)).getbands()))
    )
    path = tmp_path / "noise.png"
    Image.fromarray(noise.astype(np.uint8).squeeze()).save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated since torchvision 0.29, for reference here
        expected = read_image(str(path))
    assert torch.equal(course._read_image(path), expected)


def test_pred_and_plot_image_names_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jpg"):
        course.pred_and_plot_image(MostRed(), tmp_path / "nowhere.jpg", device="cpu")


# ---------------------------------------------------------------------------------------- downloads


def zip_bytes(files):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return content.getvalue()


GOOD = zip_bytes({"train/pizza/1": "one", "train/steak/2": "two"})


class Answers(http.server.BaseHTTPRequestHandler):
    """Good, cut, wrong and silent answers, by path."""

    def do_GET(self):
        self.server.requests.append(self.path)
        kind = self.path.split("?")[0].strip("/").removesuffix(".zip")
        if kind == "missing":
            self.send_error(404)
            return
        if kind == "moved":
            self.send_response(302)
            self.send_header("Location", "/good.zip")
            self.end_headers()
            return
        if kind == "silent":
            self.server.released.wait(10)
            return
        body = {
            "web_page": b"<html>Please log in</html>",
            "outside": zip_bytes({"good": "fine", "../evil": "bad"}),
            "absolute": zip_bytes({"/evil": "bad"}),
            "drive": zip_bytes({"C:evil": "bad"}),
            "damaged": GOOD.replace(b"one", b"0ne"),
        }.get(kind, GOOD)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if kind == "cut" else body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A local server; the test runs in an empty folder. `server.url(name)` gives an address."""
    monkeypatch.chdir(tmp_path)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.requests, server.released = [], threading.Event()
    server.url = lambda name: f"http://127.0.0.1:{server.server_port}/{name}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


def files_below(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


PHOTOS = ["data/photos/train/pizza/1", "data/photos/train/steak/2"]


def test_download_unpacks_and_removes_the_zip(server, tmp_path, capsys):
    path = course.download_data(server.url("good.zip"), "photos")
    assert path == course.Path("data") / "photos"
    assert files_below(tmp_path) == PHOTOS
    assert (path / "train/pizza/1").read_text() == "one"
    assert capsys.readouterr().out.splitlines() == [
        f"[INFO] Did not find {path} directory, creating one...",
        f"[INFO] Downloading good.zip from {server.url('good.zip')}...",
        "[INFO] Unzipping good.zip data...",
    ]


def test_download_keeps_the_zip_if_told(server, tmp_path):
    course.download_data(server.url("good.zip?raw=true"), "photos", remove_source=False)
    assert files_below(tmp_path) == ["data/good.zip", *PHOTOS]
    assert (tmp_path / "data/good.zip").read_bytes() == GOOD


def test_download_skips_an_existing_folder(server, tmp_path, capsys):
    (tmp_path / "data/photos").mkdir(parents=True)
    path = course.download_data(server.url("good.zip"), "photos")
    assert server.requests == []
    assert capsys.readouterr().out == f"[INFO] {path} directory exists, skipping download.\n"


def test_download_follows_redirects_and_encodes_spaces(server, tmp_path):
    course.download_data(server.url("moved.zip"), "photos")
    course.download_data(server.url("my photos ü.zip"), "a/b c")
    assert server.requests == ["/moved.zip", "/good.zip", "/my%20photos%20%C3%BC.zip"]
    assert (tmp_path / "data/a/b c/train/steak/2").read_text() == "two"


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("missing.zip", ConnectionError, "missing.zip: HTTP Error 404"),
        ("cut.zip", ConnectionError, rf"stopped after {len(GOOD) // 2:,} of {len(GOOD):,} bytes"),
        ("web_page.zip", ValueError, "web_page.zip.*not a complete zip file"),
        ("damaged.zip", ValueError, "not a complete zip file.*CRC"),
        ("outside.zip", ValueError, r"'\.\./evil'.*outside"),
        ("absolute.zip", ValueError, "'/evil'.*outside"),
        ("drive.zip", ValueError, "'C:evil'.*outside"),
    ],
)
def test_failed_download_leaves_nothing_and_can_be_repeated(server, tmp_path, name, error, text):
    with pytest.raises(error, match=text):
        course.download_data(server.url(name), "photos")
    assert list((tmp_path / "data").iterdir()) == []
    course.download_data(server.url("good.zip"), "photos")
    assert files_below(tmp_path) == PHOTOS


def test_download_gives_up_on_a_silent_server(server, tmp_path, monkeypatch):
    assert course.DOWNLOAD_TIMEOUT_S <= 30
    monkeypatch.setattr(course, "DOWNLOAD_TIMEOUT_S", 0.2)
    start = time.perf_counter()
    with pytest.raises(ConnectionError, match="timed out"):
        course.download_data(server.url("silent.zip"), "photos")
    assert time.perf_counter() - start < 8  # the server would have held on for 10 s
    assert list((tmp_path / "data").iterdir()) == []


def test_download_interrupted_while_unpacking_leaves_nothing(server, tmp_path, monkeypatch):
    def interrupt(archive, folder):
        (folder / "half").write_text("made")
        raise KeyboardInterrupt

    monkeypatch.setattr(zipfile.ZipFile, "extractall", interrupt)
    with pytest.raises(KeyboardInterrupt):
        course.download_data(server.url("good.zip"), "photos")
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize("as_address", [True, False])
def test_download_from_a_file_keeps_the_users_own_file(tmp_path, monkeypatch, as_address):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    own = tmp_path / "data" / "my photos ü.zip"
    own.write_bytes(GOOD)
    course.download_data(own.as_uri() if as_address else str(own), "photos")
    assert own.read_bytes() == GOOD
    assert files_below(tmp_path) == ["data/my photos ü.zip", *PHOTOS]


def test_download_of_a_missing_file_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConnectionError, match=r"nowhere\.zip"):
        course.download_data((tmp_path / "nowhere.zip").as_uri(), "photos")
    with pytest.raises(ValueError, match=r"nowhere\.zip"):
        course.download_data("nowhere.zip", "photos")
    assert list((tmp_path / "data").iterdir()) == []
