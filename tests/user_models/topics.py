"""Latent Dirichlet allocation as in Pyro's examples/lda.py.

As there: options come in a namespace, documents are columns, word positions lie in a plate nested in that of the documents, neither
plate is given a dimension, ``infer={"enumerate": "parallel"}`` on the assignments, and the guide is what subsamples the documents.
"""

from argparse import Namespace

import pyro
import pyro.distributions as dist
import torch

from tests.user_models import UserModel


def model(data=None, args=None, batch_size=None):
    with pyro.plate("topics", args.num_topics):
        topic_weights = pyro.sample("topic_weights", dist.Gamma(1.0 / args.num_topics, 1.0))
        topic_words = pyro.sample("topic_words", dist.Dirichlet(torch.ones(args.num_words) / args.num_words))
    with pyro.plate("documents", args.num_docs) as index:
        if data is not None:
            data = data[:, index]
        doc_topics = pyro.sample("doc_topics", dist.Dirichlet(topic_weights))
        with pyro.plate("words", args.num_words_per_doc):
            word_topics = pyro.sample("word_topics", dist.Categorical(doc_topics), infer={"enumerate": "parallel"})
            data = pyro.sample("doc_words", dist.Categorical(topic_words[word_topics]), obs=data)
    return topic_weights, topic_words, data


def document_plate(data=None, args=None, batch_size=None):
    """Plate of the guide."""
    return pyro.plate("documents", args.num_docs, subsample_size=batch_size, dim=-1)


def make() -> UserModel:
    args = Namespace(num_topics=3, num_words=8, num_docs=10, num_words_per_doc=5)
    data = torch.randint(args.num_words, (args.num_words_per_doc, args.num_docs))
    return UserModel(
        model, (data,), ["word_topics"], args.num_topics, 2, kwargs={"args": args}, batch={"batch_size": 4}, create_plates=document_plate
    )
