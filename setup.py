"""Package data. Install with `pip install -e .`, or `pip install -e '.[dev]'` for the tests."""

from setuptools import find_namespace_packages, setup

setup(
    name="megatron-zero-bubble",
    version="0.1.0",
    description="Megatron-shaped pretraining whose pipeline schedules have no bubbles",
    python_requires=">=3.11",
    packages=find_namespace_packages(include=["megatron*"]),
    package_data={
        "megatron.core.pipeline_parallel.zerobubble.scheduler.render": ["page/*"],
    },
    install_requires=[
        "torch==2.13.0",
        "numpy",
        "regex",
        "sentencepiece>=0.2.3",
    ],
    extras_require={
        "dev": [
            "hypothesis",
            "matplotlib",
            "mypy",
            "pytest",
            "pytest-timeout",
            "ruff",
            "tensorboard",
            "tiktoken",
            "tqdm",
            "transformers",
        ],
        "plot": ["matplotlib", "tqdm"],
        "all": ["matplotlib", "tensorboard", "tiktoken", "tqdm", "transformers", "wandb"],
    },
)
