"""Estimators and restoration in several threads, which share Pyro's handlers and torch's random state."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris

from pyro_truncated.restoration import denoise
from pyro_truncated.sklearn import SparseCoding, SpikeSlabRegressor, TruncatedMixture

DATA = load_iris().data


def in_threads(function, arguments):
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(function, arguments))


def test_fits_and_predictions_are_those_of_one_thread():
    estimators = [
        TruncatedMixture(2, max_iter=3, n_init=1, random_state=0),
        SparseCoding(2, max_iter=2, n_init=1, random_state=0),
        SpikeSlabRegressor(random_state=0),
    ]

    def predict(estimator):
        fitted = clone(estimator).fit(DATA, DATA[:, 0])
        return fitted.transform(DATA) if hasattr(fitted, "transform") else fitted.predict(DATA)

    expected = [predict(estimator) for estimator in estimators]
    for found, own in zip(in_threads(predict, 3 * estimators), 3 * expected, strict=True):
        np.testing.assert_array_equal(found, own)


def test_images_are_restored_as_in_one_thread(generator):
    images = torch.randn(4, 16, 16, generator=generator)

    def restore(image):
        return denoise(image, side=4, rounds=1, generator=torch.Generator().manual_seed(0), progress=False).image

    for found, own in zip(in_threads(restore, images), map(restore, images), strict=True):
        torch.testing.assert_close(found, own, rtol=0, atol=0)
