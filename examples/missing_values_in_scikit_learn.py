"""Dictionary learning where values are missing, inside of scikit-learn.

Pixels of handwritten digits are removed at random. A dictionary is learned from what is left, and every image is put together again from
its elements; beside it, the ways of scikit-learn to fill in what is missing. Digits have near twins among each other, so that nearest
images win here; docs/how-to/scikit-learn.md says where the dictionary does.

    python examples/missing_values_in_scikit_learn.py
"""

import argparse
import time

import numpy as np
from sklearn.datasets import load_digits
from sklearn.impute import KNNImputer, SimpleImputer

from pyro_truncated.sklearn import SparseCoding


def main(args: argparse.Namespace) -> None:
    truth = load_digits().data[: args.images]
    hole = np.random.default_rng(args.seed).random(truth.shape) < args.missing
    damaged = np.where(hole, np.nan, truth)
    coder = SparseCoding(args.components, max_iter=args.iterations, n_init=1, random_state=args.seed)
    for name, fill in {
        "mean of the pixel": lambda: SimpleImputer(keep_empty_features=True).fit_transform(damaged),
        "ten nearest images": lambda: KNNImputer(n_neighbors=10, keep_empty_features=True).fit_transform(damaged),
        "SparseCoding": lambda: coder.inverse_transform(coder.fit_transform(damaged)),
    }.items():
        start = time.process_time()
        error = np.sqrt(np.square(fill() - truth)[hole].mean())
        print(f"{name:20} RMSE of the missing pixels {error:5.2f} (of 16)   {time.process_time() - start:6.1f} CPU seconds")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--images", type=int, default=1797)
    parser.add_argument("--missing", type=float, default=0.3, help="share of the pixels that are removed")
    parser.add_argument("--components", type=int, default=32, help="dictionary elements")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.images, args.components, args.iterations = 60, 3, 2
    return args


if __name__ == "__main__":
    main(parse_args())
