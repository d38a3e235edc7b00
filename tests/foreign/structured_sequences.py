"""Structured programs in time: hidden Markov models and their relatives, capture and recapture, change points, durations."""

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.ops.indexing import Vindex

from tests.foreign.structured import Structured, structured

_POSITIVE = dist.constraints.positive
_SIMPLEX = dist.constraints.simplex
_UNIT = dist.constraints.unit_interval


def _transition(number: int) -> torch.Tensor:
    return pyro.param("transition", lambda: (torch.eye(number) + 0.3 * torch.rand(number, number) + 0.2).log_softmax(-1).exp(), _SIMPLEX)


def _emission(*shape: int) -> torch.Tensor:
    return pyro.param("emission", lambda: 0.1 + 0.8 * torch.rand(*shape), _UNIT)


def _tones(*shape: int) -> torch.Tensor:
    return torch.bernoulli(torch.full(shape, 0.4))


@structured
def independent_sequences() -> Structured:
    """Sequences in a plate, tones in a plate inside of it, all of one length."""

    def model(sequences):
        trans, emit = _transition(3), _emission(3, 2)
        tones = pyro.plate("tones", 2, dim=-1)
        with pyro.plate("sequences", len(sequences), dim=-2):
            x = torch.tensor(0)
            for t in pyro.markov(range(sequences.shape[1])):
                x = pyro.sample(f"x_{t}", dist.Categorical(Vindex(trans)[x]), infer={"enumerate": "parallel"})
                with tones as tone:
                    pyro.sample(f"y_{t}", dist.Bernoulli(Vindex(emit)[x, tone]), obs=sequences[:, t])

    return Structured(model, (_tones(2, 4, 2),), full=3, nodes=4)


@structured
def sequences_of_different_lengths() -> Structured:
    """The same with masks behind the ends, parameters with priors."""

    def model(sequences, lengths):
        trans = pyro.sample("trans", dist.Dirichlet(0.9 * torch.eye(2) + 0.1).to_event(1))
        emit = pyro.sample("emit", dist.Beta(0.5, 0.9).expand([2, 2]).to_event(2))
        tones = pyro.plate("tones", 2, dim=-1)
        with pyro.plate("sequences", len(sequences), dim=-2):
            x = torch.tensor(0)
            for t in pyro.markov(range(int(lengths.max()))):
                with poutine.mask(mask=(t < lengths).unsqueeze(-1)):
                    x = pyro.sample(f"x_{t}", dist.Categorical(Vindex(trans)[x]), infer={"enumerate": "parallel"})
                    with tones as tone:
                        pyro.sample(f"y_{t}", dist.Bernoulli(Vindex(emit)[x, tone]), obs=sequences[:, t])

    return Structured(model, (_tones(3, 4, 2), torch.tensor([4, 1, 2])), full=2, nodes=4)


@structured
def tones_depend_on_tones() -> Structured:
    """An autoregressive chain: a tone depends on the hidden state and on the tone before."""

    def model(sequences):
        trans, emit = _transition(3), _emission(3, 2, 2)
        tones = pyro.plate("tones", 2, dim=-1)
        with pyro.plate("sequences", len(sequences), dim=-2):
            x, y = torch.tensor(0), torch.zeros(())
            for t in pyro.markov(range(4)):
                x = pyro.sample(f"x_{t}", dist.Categorical(Vindex(trans)[x]), infer={"enumerate": "parallel"})
                with tones as tone:
                    y = pyro.sample(f"y_{t}", dist.Bernoulli(Vindex(emit)[x, y.long(), tone]), obs=sequences[:, t])

    return Structured(model, (_tones(2, 4, 2),), full=3, nodes=4)


@structured
def two_chains_that_meet_in_tones() -> Structured:
    """Two independent chains, both behind every tone."""

    def model(sequences):
        trans_w = pyro.param("trans_w", torch.tensor([[0.8, 0.2], [0.3, 0.7]]), _SIMPLEX)
        trans_x, emit = _transition(2), _emission(2, 2, 2)
        tones = pyro.plate("tones", 2, dim=-1)
        with pyro.plate("sequences", len(sequences), dim=-2):
            w = x = torch.tensor(0)
            for t in pyro.markov(range(3)):
                w = pyro.sample(f"w_{t}", dist.Categorical(Vindex(trans_w)[w]), infer={"enumerate": "parallel"})
                x = pyro.sample(f"x_{t}", dist.Categorical(Vindex(trans_x)[x]), infer={"enumerate": "parallel"})
                with tones as tone:
                    pyro.sample(f"y_{t}", dist.Bernoulli(Vindex(emit)[w, x, tone]), obs=sequences[:, t])

    return Structured(model, (_tones(2, 3, 2),), full=4)


@structured
def one_chain_drives_another() -> Structured:
    """A dynamic Bayes net: the second chain depends on the first one in the same step."""

    def model(sequences):
        trans_w, emit = _transition(2), _emission(2, 2, 2)
        trans_x = pyro.param("trans_x", torch.tensor([[[0.7, 0.3], [0.2, 0.8]], [[0.5, 0.5], [0.1, 0.9]]]), _SIMPLEX)
        tones = pyro.plate("tones", 2, dim=-1)
        with pyro.plate("sequences", len(sequences), dim=-2):
            w = x = torch.tensor(0)
            for t in pyro.markov(range(3)):
                w = pyro.sample(f"w_{t}", dist.Categorical(Vindex(trans_w)[w]), infer={"enumerate": "parallel"})
                x = pyro.sample(f"x_{t}", dist.Categorical(Vindex(trans_x)[w, x]), infer={"enumerate": "parallel"})
                with tones as tone:
                    pyro.sample(f"y_{t}", dist.Bernoulli(Vindex(emit)[w, x, tone]), obs=sequences[:, t])

    return Structured(model, (_tones(2, 3, 2),), full=4)


@structured
def tones_by_a_network() -> Structured:
    """Emissions by a network that reads the state and the tones before."""

    def model(sequences):
        trans, emit = _transition(3), _emission(3, 2)
        net = pyro.param("net", lambda: 0.5 * torch.randn(2, 2))
        tones = pyro.plate("tones", 2, dim=-1)
        with pyro.plate("sequences", len(sequences), dim=-2):
            x, y = torch.tensor(0), torch.zeros(2)
            for t in pyro.markov(range(3)):
                x = pyro.sample(f"x_{t}", dist.Categorical(Vindex(trans)[x]), infer={"enumerate": "parallel"})
                with tones as tone:
                    logits = Vindex(emit)[x, tone].logit() + torch.tanh(y @ net)
                    pyro.sample(f"y_{t}", dist.Bernoulli(logits=logits), obs=sequences[:, t])
                y = sequences[:, t]

    return Structured(model, (_tones(2, 3, 2),), full=3, nodes=3)


@structured
def second_order_chain() -> Structured:
    """Transitions depend on the two states before."""

    def model(sequences):
        trans = pyro.param("trans", lambda: torch.rand(2, 2, 2).softmax(-1), _SIMPLEX)
        emit = _emission(2, 2)
        tones = pyro.plate("tones", 2, dim=-1)
        with pyro.plate("sequences", len(sequences), dim=-2):
            before, now = torch.tensor(0), torch.tensor(0)
            for t in pyro.markov(range(5), history=2):
                following = pyro.sample(f"x_{t}", dist.Categorical(Vindex(trans)[before, now]), infer={"enumerate": "parallel"})
                before, now = now, following
                with tones as tone:
                    pyro.sample(f"y_{t}", dist.Bernoulli(Vindex(emit)[now, tone]), obs=sequences[:, t])

    return Structured(model, (_tones(2, 5, 2),), full=2, nodes=5)


@structured
def third_order_chain() -> Structured:
    """Transitions depend on the three states before, of three values each."""

    def model(y):
        logits = pyro.param("logits", lambda: torch.randn(3, 3, 3, 3))
        states = [torch.tensor(0)] * 3
        for t in pyro.markov(range(len(y)), history=3):
            x = pyro.sample(f"x_{t}", dist.Categorical(logits=Vindex(logits)[states[0], states[1], states[2]]))
            states = [*states[1:], x]
            pyro.sample(f"y_{t}", dist.Normal(x.to(y.dtype), 1.0), obs=y[t])

    return Structured(model, (torch.randn(7),), full=3, nodes=7)


@structured
def factorial_chain_of_vectors() -> Structured:
    """Binary causes as a vector site per step, added up in the observation."""

    def model(y):
        weight = pyro.param("weight", lambda: torch.randn(3, 2))
        s = torch.zeros(3)
        for t in pyro.markov(range(len(y))):
            s = pyro.sample(f"s_{t}", dist.Bernoulli(0.2 + 0.6 * s).to_event(1))
            pyro.sample(f"y_{t}", dist.Normal(s @ weight, 0.3).to_event(1), obs=y[t])

    return Structured(model, (torch.randn(5, 2),), full=8, truncated=6, nodes=5)


@structured
def factorial_chain_of_scalars() -> Structured:
    """The same with a site for each cause and step: the causes of a step are one decision."""

    def model(y):
        weight = pyro.param("weight", lambda: torch.randn(3, 2))
        s = [torch.tensor(0.0)] * 3
        for t in pyro.markov(range(len(y))):
            s = [pyro.sample(f"s_{t}_{m}", dist.Bernoulli(0.2 + 0.6 * s[m])) for m in range(3)]
            mean = sum(s[m].unsqueeze(-1) * weight[m] for m in range(3))
            pyro.sample(f"y_{t}", dist.Normal(mean, 0.3).to_event(1), obs=y[t])

    return Structured(model, (torch.randn(5, 2),), full=8, truncated=6, nodes=5)


@structured
def factorial_chain_in_a_plate() -> Structured:
    """The same with a plate of causes inside the step, in a plate of sequences."""

    def model(y):
        weight = pyro.param("weight", lambda: torch.randn(2, 1))
        causes = pyro.plate("causes", 2, dim=-2)
        with pyro.plate("sequences", len(y), dim=-1):
            s = torch.zeros(())
            for t in pyro.markov(range(y.shape[1])):
                with causes:
                    s = pyro.sample(f"s_{t}", dist.Bernoulli(0.2 + 0.6 * s))
                pyro.sample(f"y_{t}", dist.Normal((s * weight).sum(-2, keepdim=True), 0.5), obs=y[:, t])

    return Structured(model, (torch.randn(2, 4),), full=4, truncated=4, nodes=4)


@structured
def coupled_chains() -> Structured:
    """Two chains, each of which depends on both in the step before (coupled hidden Markov models)."""

    def model(y):
        couple = pyro.param("couple", torch.tensor(0.7))
        a = b = torch.tensor(0.0)
        for t in pyro.markov(range(len(y))):
            a, b = (
                pyro.sample(f"a_{t}", dist.Bernoulli(logits=a + couple * b - 0.5)),
                pyro.sample(f"b_{t}", dist.Bernoulli(logits=b - couple * a)),
            )
            pyro.sample(f"u_{t}", dist.Normal(a, 0.7), obs=y[t, 0])
            pyro.sample(f"v_{t}", dist.Normal(b, 0.7), obs=y[t, 1])

    return Structured(model, (torch.randn(5, 2),), full=4)


@structured
def input_dependent_transitions() -> Structured:
    """An input-output hidden Markov model: covariates move the transitions."""

    def model(x, y):
        effect = pyro.param("effect", lambda: torch.randn(3, 3))
        emission = pyro.param("rates", torch.tensor([0.5, 2.0, 6.0]), _POSITIVE)
        with pyro.plate("data", len(y)):
            z = torch.tensor(0)
            for t in pyro.markov(range(y.shape[1])):
                z = pyro.sample(f"z_{t}", dist.Categorical(logits=Vindex(effect)[z] * x[:, t, None]))
                pyro.sample(f"y_{t}", dist.Poisson(emission[z]), obs=y[:, t])

    return Structured(model, (torch.randn(2, 4), torch.poisson(torch.full((2, 4), 2.0))), full=3, nodes=4)


@structured
def left_to_right_chain() -> Structured:
    """A chain that never goes back: transitions of probability zero."""

    def model(y):
        stay = pyro.param("stay", torch.tensor([0.6, 0.5, 0.8]), _UNIT)
        zero = torch.zeros(())
        trans = torch.stack(
            [
                torch.stack([stay[0], 1 - stay[0], zero, zero]),
                torch.stack([zero, stay[1], 1 - stay[1], zero]),
                torch.stack([zero, zero, stay[2], 1 - stay[2]]),
                torch.stack([zero, zero, zero, zero + 1]),
            ]
        )
        with pyro.plate("data", len(y)):
            z = torch.tensor(0)
            for t in pyro.markov(range(y.shape[1])):
                z = pyro.sample(f"z_{t}", dist.Categorical(Vindex(trans)[z]))
                pyro.sample(f"y_{t}", dist.Normal(z.to(y.dtype), 0.8), obs=y[:, t])

    return Structured(model, (torch.randn(2, 4) + torch.arange(4) * 0.8,), full=4, truncated=3, nodes=4)


@structured
def ended_by_a_factor() -> Structured:
    """Forbidden words: a factor of minus infinity where a state follows itself."""

    def model(y):
        loc = pyro.param("loc", torch.tensor([-1.0, 0.0, 1.0]))
        z = None
        for t in range(len(y)):
            before, z = z, pyro.sample(f"z_{t}", dist.Categorical(logits=torch.tensor([1.0, 0.2, -0.5])))
            if before is not None:
                pyro.factor(f"differs_{t}", torch.where(before == z, -torch.inf, 0.0))
            pyro.sample(f"y_{t}", dist.Normal(loc[z], 0.7), obs=y[t])

    return Structured(model, (torch.randn(6),), full=3, nodes=6)


@structured
def knowledge_tracing_of_skills() -> Structured:
    """Bayesian knowledge tracing: students in a plate, a skill is learnt once; answers slip and are guessed."""

    def model(correct):
        learn = pyro.param("learn", torch.tensor(0.3), _UNIT)
        slip = pyro.sample("slip", dist.Beta(1.0, 9.0))
        guess = pyro.sample("guess", dist.Beta(2.0, 8.0))
        with pyro.plate("students", len(correct)):
            knows = pyro.sample("knows_0", dist.Bernoulli(0.3))
            for t in range(correct.shape[1]):
                if t:
                    knows = pyro.sample(f"knows_{t}", dist.Bernoulli(knows + (1 - knows) * learn))
                pyro.sample(f"correct_{t}", dist.Bernoulli(knows * (1 - slip) + (1 - knows) * guess), obs=correct[:, t])

    return Structured(model, (torch.bernoulli(torch.full((3, 5), 0.6)),), full=2, nodes=5)


@structured
def change_points_as_switches() -> Structured:
    """Change points: at each step a switch, and the level of the segment as a category that is drawn anew."""

    def model(y):
        levels = pyro.param("levels", torch.tensor([-1.0, 0.3, 2.0]))
        level = pyro.sample("level_0", dist.Categorical(torch.ones(3)))
        pyro.sample("y_0", dist.Normal(levels[level], 0.5), obs=y[0])
        for t in range(1, len(y)):
            switch = pyro.sample(f"switch_{t}", dist.Bernoulli(0.2))
            keep = torch.nn.functional.one_hot(level, 3) * 0.999 + 0.001 / 3
            probs = torch.where(switch.unsqueeze(-1) > 0, torch.ones(3) / 3, keep / keep.sum(-1, keepdim=True))
            level = pyro.sample(f"level_{t}", dist.Categorical(probs))
            pyro.sample(f"y_{t}", dist.Normal(levels[level], 0.5), obs=y[t])

    return Structured(model, (torch.randn(5),), full=3)


@structured
def hidden_semi_markov() -> Structured:
    """A hidden semi-Markov model: a regime, and a counter of the steps that are left of it, both reset where it reaches zero."""

    def model(y):
        loc = pyro.param("loc", torch.tensor([-1.0, 1.5]))
        duration = pyro.param("duration", torch.tensor([0.2, 0.5, 0.3]), _SIMPLEX)
        regime, left = torch.tensor(0), torch.tensor(0)
        for t in pyro.markov(range(len(y))):
            ends = (left == 0).unsqueeze(-1)
            keeps = torch.nn.functional.one_hot(regime, 2).to(y.dtype)
            regime = pyro.sample(f"regime_{t}", dist.Categorical(torch.where(ends, torch.tensor([0.4, 0.6]), keeps)))
            counts = torch.nn.functional.one_hot((left - 1).clamp(min=0), 3).to(y.dtype)
            left = pyro.sample(f"left_{t}", dist.Categorical(torch.where(ends, duration, counts)))
            pyro.sample(f"y_{t}", dist.Normal(loc[regime], 0.8), obs=y[t])

    return Structured(model, (torch.randn(5),), full=6)


@structured
def cormack_jolly_seber() -> Structured:
    """Capture and recapture: animals survive from the first capture on, and are seen or not; masked before it."""

    def model(captures, first):
        survive, see = pyro.param("survive", torch.tensor(0.7), _UNIT), pyro.param("see", torch.tensor(0.4), _UNIT)
        with pyro.plate("animals", len(captures)):
            z = torch.ones(())
            for t in pyro.markov(range(captures.shape[1])):
                with poutine.mask(mask=first < t):
                    z = pyro.sample(
                        f"z_{t}", dist.Bernoulli(torch.where(first < t, z, torch.ones(())) * survive), infer={"enumerate": "parallel"}
                    )
                    pyro.sample(f"y_{t}", dist.Bernoulli(z * see), obs=captures[:, t])

    return Structured(model, (torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0]]), torch.tensor([0, 1, 0])), full=2, nodes=4)


@structured
def jolly_seber() -> Structured:
    """Animals not yet entered, alive, or dead; an observation of zero probability where they are not alive."""

    def model(captures):
        enter, survive = pyro.param("enter", torch.tensor(0.3), _UNIT), pyro.param("survive", torch.tensor(0.8), _UNIT)
        see = pyro.sample("see", dist.Beta(2.0, 2.0))
        zero = torch.zeros(())
        trans = torch.stack(
            [
                torch.stack([1 - enter, enter, zero]),
                torch.stack([zero, survive, 1 - survive]),
                torch.stack([zero, zero, zero + 1]),
            ]
        )
        with pyro.plate("animals", len(captures)):
            z = torch.tensor(0)
            for t in pyro.markov(range(captures.shape[1])):
                z = pyro.sample(f"z_{t}", dist.Categorical(Vindex(trans)[z]))
                pyro.sample(f"y_{t}", dist.Bernoulli((z == 1) * see), obs=captures[:, t])

    return Structured(model, (torch.tensor([[0.0, 1, 0, 0], [0, 0, 1, 0]]),), full=3, truncated=3, nodes=4)


@structured
def semi_supervised_chain() -> Structured:
    """States are known at some steps of some sequences (``obs_mask``)."""

    def model(words, states, known):
        trans = pyro.param("trans", lambda: torch.rand(3, 3).softmax(-1), _SIMPLEX)
        phi = pyro.param("phi", lambda: torch.rand(3, 3).softmax(-1), _SIMPLEX)
        with pyro.plate("data", len(words)):
            z = torch.tensor(0)
            for t in pyro.markov(range(words.shape[1])):
                z = pyro.sample(f"z_{t}", dist.Categorical(Vindex(trans)[z]), obs=states[:, t], obs_mask=known[:, t])
                pyro.sample(f"word_{t}", dist.Categorical(Vindex(phi)[z]), obs=words[:, t])

    known = torch.tensor([[True, False, True], [False, False, True]])
    return Structured(model, (torch.randint(3, (2, 3)), torch.randint(3, (2, 3)), known), full=3, nodes=3)


@structured
def states_known_at_one_step() -> Structured:
    """A step of the chain is observed altogether: it falls into two parts."""

    def model(y):
        trans = _transition(3)
        z = torch.tensor(0)
        for t in pyro.markov(range(7)):
            obs = torch.tensor(1) if t == 3 else None
            z = pyro.sample(f"z_{t}", dist.Categorical(Vindex(trans)[z]), obs=obs)
            pyro.sample(f"y_{t}", dist.Normal(z.to(y.dtype), 1.0), obs=y[t])

    return Structured(model, (torch.randn(7),), full=3, truncated=3, nodes=6)


@structured
def regime_switching_with_a_trend() -> Structured:
    """Regimes of one series; slope and volatility are latents with a mean-field normal guide."""

    def model(y):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        regime = torch.tensor(0)
        for t in pyro.markov(range(len(y))):
            regime = pyro.sample(f"regime_{t}", dist.Categorical(torch.tensor([[0.8, 0.2], [0.3, 0.7]])[regime]))
            pyro.sample(f"y_{t}", dist.Normal(slope * t * regime, 0.5 + regime), obs=y[t])

    return Structured(model, (torch.randn(6),), full=2, nodes=6)


@structured
def profile_chain() -> Structured:
    """A profile of a protein family: match, insert and delete states, emissions skipped where deleted."""

    def model(y):
        trans, loc = _transition(3), pyro.param("loc", torch.tensor([0.0, 1.0]))
        with pyro.plate("data", len(y)):
            z = torch.tensor(0)
            for t in pyro.markov(range(y.shape[1])):
                z = pyro.sample(f"z_{t}", dist.Categorical(Vindex(trans)[z]))
                with poutine.mask(mask=z < 2):
                    pyro.sample(f"y_{t}", dist.Normal(loc[z.clamp(max=1)], 1.0), obs=y[:, t])

    return Structured(model, (torch.randn(2, 4),), full=3, truncated=3, nodes=4)


@structured
def counts_that_thin_out() -> Structured:
    """An open population: survivors are a thinned count of those before; counted with errors (Dail and Madsen)."""

    def model(y):
        survive, seen = pyro.param("survive", torch.tensor(0.7), _UNIT), pyro.param("seen", torch.tensor(0.6), _UNIT)
        count = pyro.sample("count_0", dist.Binomial(5, 0.6))
        for t in range(len(y)):
            if t:
                count = pyro.sample(f"count_{t}", dist.Binomial(count, survive))
            pyro.sample(f"y_{t}", dist.Binomial(count, seen), obs=y[t])

    return Structured(
        model, (torch.tensor([3.0, 2.0, 2.0, 1.0]),), full=6, truncated=5, nodes=4, max_count={f"count_{t}": 5 for t in range(4)}
    )


@structured
def delta_between_steps() -> Structured:
    """What follows from a state goes into the next step through a deterministic site."""

    def model(y):
        gain = pyro.param("gain", torch.tensor(0.8))
        level = torch.tensor(0.0)
        for t in range(len(y)):
            s = pyro.sample(f"s_{t}", dist.Bernoulli(logits=level))
            level = pyro.deterministic(f"level_{t}", gain * s - 0.3)
            pyro.sample(f"y_{t}", dist.Normal(level, 0.7), obs=y[t])

    return Structured(model, (torch.randn(6),), full=2, nodes=6)
