"""Hidden Markov models and their relatives, most after the variants of Pyro's examples/hmm.py."""

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.ops.indexing import Vindex

from tests.foreign import Foreign, foreign

STICKY = torch.tensor([[0.8, 0.2], [0.3, 0.7]], dtype=torch.float64)


def _tones(num_sequences: int = 2, length: int = 3, tones: int = 2) -> torch.Tensor:
    return torch.bernoulli(torch.full((num_sequences, length, tones), 0.4))


@foreign
def hmm_0() -> Foreign:
    """Model 0 of Pyro's hmm.py: sequences in a sequential plate, tones in a vectorised one."""

    def model(sequences, lengths):
        probs_x = pyro.param("probs_x", 0.4 * torch.eye(2) + 0.3, constraint=dist.constraints.simplex)
        probs_y = pyro.param("probs_y", torch.tensor([[0.2, 0.7], [0.6, 0.4]]), constraint=dist.constraints.unit_interval)
        tones = pyro.plate("tones", sequences.shape[-1], dim=-1)
        for i in pyro.plate("sequences", len(sequences)):
            x = 0
            for t in pyro.markov(range(int(lengths[i]))):
                x = pyro.sample(f"x_{i}_{t}", dist.Categorical(Vindex(probs_x)[x]), infer={"enumerate": "parallel"})
                with tones:
                    pyro.sample(f"y_{i}_{t}", dist.Bernoulli(Vindex(probs_y)[x.unsqueeze(-1), torch.arange(2)]), obs=sequences[i, t])

    return Foreign(
        model, (_tones(), torch.tensor([3, 2])), plates=(), limits={"AutoGuideList": "AutoGuide does not support sequential pyro.plate"}
    )


@foreign
def hmm_1() -> Foreign:
    """Model 1 of Pyro's hmm.py: sequences of unequal lengths in a plate, ended by a mask."""

    def model(sequences, lengths):
        probs_x = pyro.sample("probs_x", dist.Dirichlet(0.9 * torch.eye(2) + 0.1).to_event(1))
        probs_y = pyro.sample("probs_y", dist.Beta(0.5, 0.9).expand([2, 2]).to_event(2))
        tones = pyro.plate("tones", 2, dim=-1)
        with pyro.plate("sequences", len(sequences), dim=-2):
            x = 0
            for t in pyro.markov(range(int(lengths.max()))):
                with poutine.mask(mask=(t < lengths).unsqueeze(-1)):
                    x = pyro.sample(f"x_{t}", dist.Categorical(Vindex(probs_x)[x]), infer={"enumerate": "parallel"})
                    with tones as tone:
                        pyro.sample(f"y_{t}", dist.Bernoulli(Vindex(probs_y)[x, tone]), obs=sequences[:, t])

    return Foreign(model, (_tones(4), torch.tensor([3, 1, 2, 3])), plates=("sequences",))


@foreign
def hmm_2() -> Foreign:
    """Model 2 of Pyro's hmm.py: a tone depends on the hidden state and on the tone before."""

    def model(sequences):
        probs_x = pyro.sample("probs_x", dist.Dirichlet(0.9 * torch.eye(2) + 0.1).to_event(1))
        probs_y = pyro.sample("probs_y", dist.Beta(0.5, 0.9).expand([2, 2, 2]).to_event(3))
        tones = pyro.plate("tones", 2, dim=-1)
        with pyro.plate("sequences", len(sequences), dim=-2):
            x, y = 0, torch.zeros(())
            for t in pyro.markov(range(3)):
                x = pyro.sample(f"x_{t}", dist.Categorical(Vindex(probs_x)[x]), infer={"enumerate": "parallel"})
                with tones as tone:
                    y = pyro.sample(f"y_{t}", dist.Bernoulli(Vindex(probs_y)[x, y.long(), tone]), obs=sequences[:, t])

    return Foreign(model, (_tones(3),), plates=("sequences",))


@foreign
def hmm_3() -> Foreign:
    """Model 3 of Pyro's hmm.py: two hidden chains that meet in the tones."""

    def model(sequences):
        probs_w = pyro.sample("probs_w", dist.Dirichlet(0.9 * torch.eye(2) + 0.1).to_event(1))
        probs_x = pyro.sample("probs_x", dist.Dirichlet(0.9 * torch.eye(2) + 0.1).to_event(1))
        probs_y = pyro.sample("probs_y", dist.Beta(0.5, 0.9).expand([2, 2, 2]).to_event(3))
        tones = pyro.plate("tones", 2, dim=-1)
        with pyro.plate("sequences", len(sequences), dim=-2):
            w = x = 0
            for t in pyro.markov(range(2)):
                w = pyro.sample(f"w_{t}", dist.Categorical(Vindex(probs_w)[w]), infer={"enumerate": "parallel"})
                x = pyro.sample(f"x_{t}", dist.Categorical(Vindex(probs_x)[x]), infer={"enumerate": "parallel"})
                with tones as tone:
                    pyro.sample(f"y_{t}", dist.Bernoulli(Vindex(probs_y)[w, x, tone]), obs=sequences[:, t])

    return Foreign(model, (_tones(3, 2),), plates=("sequences",))


@foreign
def hmm_4() -> Foreign:
    """Model 4 of Pyro's hmm.py: the second chain depends on the first one (a dynamic Bayes net)."""

    def model(sequences):
        probs_w = pyro.sample("probs_w", dist.Dirichlet(0.9 * torch.eye(2) + 0.1).to_event(1))
        probs_x = pyro.sample("probs_x", dist.Dirichlet(torch.tensor([0.9, 0.6])).expand([2, 2]).to_event(2))
        probs_y = pyro.sample("probs_y", dist.Beta(0.5, 0.9).expand([2, 2, 2]).to_event(3))
        tones = pyro.plate("tones", 2, dim=-1)
        with pyro.plate("sequences", len(sequences), dim=-2):
            w = x = torch.tensor(0)
            for t in pyro.markov(range(2)):
                w = pyro.sample(f"w_{t}", dist.Categorical(Vindex(probs_w)[w]), infer={"enumerate": "parallel"})
                x = pyro.sample(f"x_{t}", dist.Categorical(Vindex(probs_x)[w, x]), infer={"enumerate": "parallel"})
                with tones as tone:
                    pyro.sample(f"y_{t}", dist.Bernoulli(Vindex(probs_y)[w, x, tone]), obs=sequences[:, t])

    return Foreign(model, (_tones(3, 2),), plates=("sequences",))


@foreign
def hmm_6() -> Foreign:
    """Model 6 of Pyro's hmm.py: a second-order chain (``history=2``) whose transitions are parameters."""

    def model(sequences):
        probs_x = pyro.param("probs_x", 0.5 * torch.ones(2, 2, 2), constraint=dist.constraints.simplex)
        probs_y = pyro.sample("probs_y", dist.Beta(0.5, 0.9).expand([2, 2]).to_event(2))
        tones = pyro.plate("tones", 2, dim=-1)
        with pyro.plate("sequences", len(sequences), dim=-2):
            before, now = torch.tensor(0), torch.tensor(0)
            for t in pyro.markov(range(3), history=2):
                following = pyro.sample(f"x_{t}", dist.Categorical(Vindex(probs_x)[before, now]), infer={"enumerate": "parallel"})
                before, now = now, following
                with tones as tone:
                    pyro.sample(f"y_{t}", dist.Bernoulli(Vindex(probs_y)[now, tone]), obs=sequences[:, t])

    return Foreign(model, (_tones(3),), plates=("sequences",))


@foreign
def path_vector() -> Foreign:
    """A whole path as one vector site; its transitions enter by ``pyro.factor``."""

    def model(y):
        loc = pyro.sample("loc", dist.Normal(torch.tensor([-1.0, 1.0]), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(y.shape[1], 2)).to_event(1))
            pyro.factor("transitions", Vindex(2 * STICKY)[z[..., :-1], z[..., 1:]].log().sum(-1))
            pyro.sample("y", dist.Normal(Vindex(loc)[..., z], 0.7).to_event(1), obs=y)

    return Foreign(model, (torch.randn(3, 4),))


@foreign
def factorial_hmm() -> Foreign:
    """A factorial hidden Markov model (Ghahramani and Jordan): binary chains as vectors, added up in the observation."""

    def model(y):
        weight = pyro.sample("weight", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
        with pyro.plate("data", len(y)):
            s = torch.zeros(2)
            for t in pyro.markov(range(y.shape[1])):
                s = pyro.sample(f"s_{t}", dist.Bernoulli(0.2 + 0.6 * s).to_event(1))
                pyro.sample(f"y_{t}", dist.Normal(s @ weight, 0.5).to_event(1), obs=y[:, t])

    return Foreign(model, (torch.randn(3, 3, 2),))


@foreign
def semi_supervised_hmm() -> Foreign:
    """Stan User's Guide, "semisupervised estimation": states are known in part of the sequences."""

    def model(words, states, known):
        theta = pyro.sample("theta", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
        phi = pyro.sample("phi", dist.Dirichlet(0.1 + torch.ones(2, 3)).to_event(1))
        with pyro.plate("data", len(words)):
            z = torch.tensor(0)
            for t in pyro.markov(range(words.shape[1])):
                z = pyro.sample(f"z_{t}", dist.Categorical(Vindex(theta)[z]), obs=states[:, t], obs_mask=known)
                pyro.sample(f"word_{t}", dist.Categorical(Vindex(phi)[z]), obs=words[:, t])

    states = torch.randint(2, (4, 3))
    return Foreign(model, (torch.randint(3, (4, 3)), states, torch.tensor([True, False, False, True])))


@foreign
def knowledge_tracing() -> Foreign:
    """Bayesian knowledge tracing (Corbett and Anderson): a skill is learnt once, answers slip and are guessed."""

    def model(correct):
        learn = pyro.sample("learn", dist.Beta(2.0, 5.0))
        slip, guess = pyro.sample("slip", dist.Beta(1.0, 9.0)), pyro.sample("guess", dist.Beta(2.0, 8.0))
        with pyro.plate("data", len(correct)):
            knows = pyro.sample("knows_0", dist.Bernoulli(0.3))
            for t in range(correct.shape[1]):
                if t:
                    knows = pyro.sample(f"knows_{t}", dist.Bernoulli(knows + (1 - knows) * learn))
                pyro.sample(f"correct_{t}", dist.Bernoulli(knows * (1 - slip) + (1 - knows) * guess), obs=correct[:, t])

    return Foreign(model, (torch.bernoulli(torch.full((5, 4), 0.6)),))


@foreign
def regime_switching_growth() -> Foreign:
    """Hamilton's model of booms and recessions: one series, a regime at each quarter outside of all plates."""

    def model(growth):
        mean = pyro.sample("mean", dist.Normal(torch.tensor([-0.5, 1.0]), 0.5).to_event(1))
        stay = pyro.sample("stay", dist.Beta(8.0, 2.0).expand([2]).to_event(1))
        regime = torch.tensor(1.0)
        for t in pyro.markov(range(len(growth))):
            boom = regime * stay[..., 1] + (1 - regime) * (1 - stay[..., 0])
            regime = pyro.sample(f"regime_{t}", dist.Bernoulli(boom))
            pyro.sample(f"growth_{t}", dist.Normal(mean[..., regime.long()], 0.4), obs=growth[t])

    return Foreign(model, (torch.randn(5),), plates=())


@foreign
def regime_switching_volatility() -> Foreign:
    """Returns of several assets whose volatility switches between calm and stormy."""

    def model(returns):
        volatility = pyro.param("volatility", torch.tensor([0.5, 2.0]), constraint=dist.constraints.positive)
        with pyro.plate("data", returns.shape[-1]):
            regime = torch.tensor(0)
            for t in pyro.markov(range(len(returns))):
                regime = pyro.sample(f"regime_{t}", dist.Categorical(STICKY[regime]))
                pyro.sample(f"return_{t}", dist.Normal(0.0, volatility[regime]), obs=returns[t])

    return Foreign(model, (torch.randn(4, 3),))


@foreign
def telegraph_counts() -> Foreign:
    """A random telegraph: a source flips on and off, photons are counted (also: earthquakes by a Poisson chain)."""

    def model(counts):
        low, high = pyro.sample("low", dist.Gamma(2.0, 2.0)), pyro.sample("high", dist.Gamma(8.0, 1.0))
        with pyro.plate("data", len(counts)):
            on = torch.tensor(0.0)
            for t in pyro.markov(range(counts.shape[1])):
                on = pyro.sample(f"on_{t}", dist.Bernoulli(0.3 + 0.5 * on))
                pyro.sample(f"count_{t}", dist.Poisson(low + on * high), obs=counts[:, t])

    return Foreign(model, (torch.poisson(torch.full((3, 4), 3.0)),))


@foreign
def dishonest_casino() -> Foreign:
    """The occasionally dishonest casino (Durbin et al.): a fair die is swapped for a loaded one now and then."""

    def model(rolls):
        loaded = pyro.param("loaded", torch.tensor([0.1, 0.1, 0.1, 0.1, 0.1, 0.5]), constraint=dist.constraints.simplex)
        dice = torch.stack([torch.full((6,), 1 / 6), loaded])
        with pyro.plate("data", len(rolls)):
            z = torch.tensor(0)
            for t in pyro.markov(range(rolls.shape[1])):
                z = pyro.sample(f"die_{t}", dist.Categorical(STICKY[z]), infer={"enumerate": "parallel"})
                pyro.sample(f"roll_{t}", dist.Categorical(dice[z]), obs=rolls[:, t])

    return Foreign(model, (torch.randint(6, (3, 5)),))


@foreign
def umbrella_world() -> Foreign:
    """The umbrella world of Russell and Norvig: is it raining, seen from indoors; known probabilities, no plate."""

    def model(umbrella):
        rain = torch.tensor(0.5)
        for day, seen in enumerate(umbrella):
            rain = pyro.sample(f"rain_{day}", dist.Bernoulli(0.3 + 0.4 * rain))
            pyro.sample(f"umbrella_{day}", dist.Bernoulli(0.2 + 0.7 * rain), obs=seen)

    return Foreign(model, (torch.tensor([1.0, 1.0, 0.0, 1.0]),), plates=())


@foreign
def input_output_hmm() -> Foreign:
    """An input-output hidden Markov model: covariates move the transitions, the observation is three-valued."""

    def model(x, y):
        effect = pyro.sample("effect", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
        emission = pyro.sample("emission", dist.Dirichlet(torch.ones(2, 3)).to_event(1))
        with pyro.plate("data", len(y)):
            z = torch.tensor(0)
            for t in pyro.markov(range(y.shape[1])):
                z = pyro.sample(f"z_{t}", dist.Categorical(logits=Vindex(effect)[z] * x[:, t, None]))
                pyro.sample(f"y_{t}", dist.Categorical(Vindex(emission)[z]), obs=y[:, t])

    return Foreign(model, (torch.randn(3, 4), torch.randint(3, (3, 4))))


@foreign
def hidden_duration() -> Foreign:
    """An episode of unknown start and duration in a series: two categorical sites, a window that they span."""

    def model(y):
        jump = pyro.sample("jump", dist.Normal(0.0, 2.0))
        time = torch.arange(y.shape[1])
        with pyro.plate("data", len(y)):
            start = pyro.sample("start", dist.Categorical(torch.ones(y.shape[1])))
            duration = pyro.sample("duration", dist.Categorical(torch.tensor([0.1, 0.3, 0.4, 0.2])))
            inside = (time >= start.unsqueeze(-1)) & (time < (start + duration).unsqueeze(-1))
            pyro.sample("y", dist.Normal(jump * inside, 1.0).to_event(1), obs=y)

    return Foreign(model, (torch.randn(3, 5),))
