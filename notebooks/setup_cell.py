# Set-up, the same in every notebook: finds the course's helper module, or installs it (Colab, Kaggle).
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = ""  # where the course is published, as in "https://github.com/OWNER/NAME"

near = [Path.cwd(), *Path.cwd().parents[:2]]  # the notebook's folder, and those above it
sys.path[:0] = [str(f) for f in near if (f / "dataloading" / "__init__.py").is_file()][:1]
address = os.environ.get("DATALOADING_REPOSITORY", REPOSITORY)
hosted = "COLAB_RELEASE_TAG" in os.environ or "KAGGLE_KERNEL_RUN_TYPE" in os.environ
if hosted and address and not importlib.util.find_spec("dataloading"):
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", f"git+{address}"])
    importlib.invalidate_caches()
try:
    import dataloading

    version = dataloading.__version__  # tells the course's package from another of that name
    front = sys.path.index("") if "" in sys.path else 0  # "" is the notebook's folder, which may
    sys.path.insert(front, str(Path(dataloading.__file__).parents[1]))  # hold files of our names
    import helper_functions

    diagnose = helper_functions.diagnose_dataloader  # the Learn PyTorch course's file has none
except (ImportError, AttributeError) as error:
    raise ImportError(
        "The course's helper module was not found. Open this notebook in a copy of the project, with "
        "the Python that its README sets up; on Colab or Kaggle put the project's address into "
        "REPOSITORY above. Then restart the kernel and run this cell again."
    ) from error
print("The course is ready.")
