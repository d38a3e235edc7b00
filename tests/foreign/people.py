"""People: raters of unequal skill, test takers, patients, answers to surveys."""

import pyro
import pyro.distributions as dist
import torch
from pyro.ops.indexing import Vindex

from tests.foreign import Foreign, foreign

POSITIONS = torch.tensor([0, 0, 1, 2])


@foreign
def multinomial_annotation() -> Foreign:
    """NumPyro's annotation example, model "multinomial": all annotators alike (Passonneau and Carpenter; Paun et al.)."""

    def model(annotations):
        with pyro.plate("class", 3):
            zeta = pyro.sample("zeta", dist.Dirichlet(torch.ones(3)))
        pi = pyro.sample("pi", dist.Dirichlet(torch.ones(3)))
        with pyro.plate("item", len(annotations), dim=-2):
            c = pyro.sample("c", dist.Categorical(pi))
            with pyro.plate("position", annotations.shape[1], dim=-1):
                pyro.sample("y", dist.Categorical(zeta[c]), obs=annotations)

    return Foreign(model, (torch.randint(3, (4, 3)),), plates=("item",))


@foreign
def dawid_skene() -> Foreign:
    """NumPyro's annotation example, "dawid_skene": a confusion matrix for each annotator."""

    def model(positions, annotations):
        with pyro.plate("annotator", 3, dim=-2), pyro.plate("class", 3, dim=-1):
            beta = pyro.sample("beta", dist.Dirichlet(torch.ones(3)))
        pi = pyro.sample("pi", dist.Dirichlet(torch.ones(3)))
        with pyro.plate("item", len(annotations), dim=-2):
            c = pyro.sample("c", dist.Categorical(pi))
            with pyro.plate("position", len(positions), dim=-1):
                pyro.sample("y", dist.Categorical(Vindex(beta)[positions, c, :]), obs=annotations)

    return Foreign(model, (POSITIONS, torch.randint(3, (4, 4))), plates=("item",), new=(POSITIONS, torch.randint(3, (2, 4))))


@foreign
def mace() -> Foreign:
    """NumPyro's annotation example, "mace" (Hovy et al.): an annotator who does not care spams."""

    def model(positions, annotations):
        with pyro.plate("annotator", 3):
            epsilon = pyro.sample("epsilon", dist.Dirichlet(10 * torch.ones(3)))
            theta = pyro.sample("theta", dist.Beta(0.5, 0.5))
        with pyro.plate("item", len(annotations), dim=-2):
            c = pyro.sample("c", dist.Categorical(logits=torch.zeros(3)))
            with pyro.plate("position", len(positions), dim=-1):
                s = pyro.sample("s", dist.Bernoulli(1 - theta[positions]))
                probs = torch.where((s == 0).unsqueeze(-1), torch.eye(3)[c], epsilon[positions])
                pyro.sample("y", dist.Categorical(probs), obs=annotations)

    return Foreign(model, (POSITIONS, torch.randint(3, (3, 4))), plates=("item",))


@foreign
def hierarchical_dawid_skene() -> Foreign:
    """NumPyro's annotation example, "hierarchical_dawid_skene": logits of annotators around those of a population."""

    def model(positions, annotations):
        with pyro.plate("class", 2):
            mean = pyro.sample("mean", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
            scale = pyro.sample("scale", dist.HalfNormal(1.0).expand([2]).to_event(1))
        with pyro.plate("annotator", 3, dim=-2), pyro.plate("class_", 2, dim=-1):
            beta = pyro.sample("beta", dist.Normal(mean, scale).to_event(1))
        with pyro.plate("item", len(annotations), dim=-2):
            c = pyro.sample("c", dist.Categorical(torch.tensor([0.4, 0.6])))
            with pyro.plate("position", len(positions), dim=-1):
                pyro.sample("y", dist.Categorical(logits=Vindex(beta)[positions, c, :]), obs=annotations)

    return Foreign(model, (POSITIONS, torch.randint(2, (3, 4))), plates=("item",))


@foreign
def item_difficulty() -> Foreign:
    """NumPyro's annotation example, "item_difficulty": an item has a class and a difficulty of its own."""

    def model(annotations):
        with pyro.plate("class", 2):
            eta = pyro.sample("eta", dist.Normal(0.0, 3.0).expand([1]).to_event(1))
            chi = pyro.sample("chi", dist.HalfNormal(1.0).expand([1]).to_event(1))
        pi = pyro.sample("pi", dist.Dirichlet(torch.ones(2)))
        with pyro.plate("item", len(annotations), dim=-2):
            c = pyro.sample("c", dist.Categorical(pi))
            theta = pyro.sample("theta", dist.Normal(eta[c], chi[c]).to_event(1))
            logits = torch.nn.functional.pad(theta, (0, 1))
            with pyro.plate("position", annotations.shape[1], dim=-1):
                pyro.sample("y", dist.Categorical(logits=logits), obs=annotations)

    return Foreign(model, (torch.randint(2, (4, 3)),), plates=("item",), limits={"infer": "cannot know the latents"})


@foreign
def glad() -> Foreign:
    """GLAD (Whitehill et al.) with abilities known from elsewhere: labels by ability times ease of the item."""

    def model(labels, ability):
        ease = pyro.param("ease", torch.ones(len(labels)), constraint=dist.constraints.positive)
        with pyro.plate("items", len(labels)):
            truth = pyro.sample("truth", dist.Bernoulli(0.5))
            right = torch.sigmoid(ability * ease.unsqueeze(-1))
            truth = truth.unsqueeze(-1)
            pyro.sample("labels", dist.Bernoulli(truth * right + (1 - truth) * (1 - right)).to_event(1), obs=labels)

    return Foreign(model, (torch.bernoulli(torch.full((4, 3), 0.5)), torch.tensor([0.5, 2.0, 1.0])), plates=("items",))


@foreign
def dina() -> Foreign:
    """DINA, a cognitive diagnosis model (in Stan's case studies): an item needs all its skills, but for slips and guesses."""

    q = torch.tensor([[1.0, 0, 0], [0, 1, 0], [1, 1, 0], [0, 1, 1]], dtype=torch.float64)

    def model(answers):
        slip = pyro.sample("slip", dist.Beta(torch.full((4,), 1.0), torch.full((4,), 8.0)).to_event(1))
        guess = pyro.sample("guess", dist.Beta(torch.full((4,), 1.0), torch.full((4,), 8.0)).to_event(1))
        with pyro.plate("students", len(answers)):
            skills = pyro.sample("skills", dist.Bernoulli(torch.full((3,), 0.5)).to_event(1))
            masters = (skills.unsqueeze(-2) >= q).all(-1)
            pyro.sample("answers", dist.Bernoulli(torch.where(masters, 1 - slip, guess)).to_event(1), obs=answers)

    return Foreign(model, (torch.bernoulli(torch.full((4, 4), 0.5)),), plates=("students",))


@foreign
def rasch_with_guessers() -> Foreign:
    """A Rasch model with a latent class of guessers (mixture IRT): abilities have a guide, the class is summed out."""

    def model(answers):
        difficulty = pyro.sample("difficulty", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("students", len(answers)):
            ability = pyro.sample("ability", dist.Normal(0.0, 1.0))
            guesses = pyro.sample("guesses", dist.Bernoulli(0.2))
            logits = torch.where(guesses.unsqueeze(-1) > 0, -1.0, ability.unsqueeze(-1) - difficulty)
            pyro.sample("answers", dist.Bernoulli(logits=logits).to_event(1), obs=answers)

    answers = torch.bernoulli(torch.full((5, 3), 0.5))
    return Foreign(model, (answers,), plates=("students",), limits={"infer": "cannot know the latents"})


@foreign
def latent_class_analysis() -> Foreign:
    """Latent class analysis (Lazarsfeld): classes behind binary items, item probabilities in nested plates."""

    def model(items):
        classes = pyro.sample("classes", dist.Dirichlet(torch.ones(3)))
        with pyro.plate("items", 4, dim=-2), pyro.plate("class", 3, dim=-1):
            rho = pyro.sample("rho", dist.Beta(1.0, 1.0))
        with pyro.plate("persons", items.shape[1], dim=-1):
            z = pyro.sample("z", dist.Categorical(classes))
            with pyro.plate("answers", 4, dim=-2) as item:
                pyro.sample("y", dist.Bernoulli(Vindex(rho)[item.unsqueeze(-1), z]), obs=items)

    return Foreign(model, (torch.bernoulli(torch.full((4, 5), 0.5)),), plates=("persons",))


@foreign
def hui_walter() -> Foreign:
    """Two tests without a gold standard (Hui and Walter; Joseph, Gyorkos and Coupal in BUGS): the disease is latent."""

    def model(tests):
        prevalence = pyro.sample("prevalence", dist.Beta(1.0, 1.0))
        sensitivity = pyro.sample("sensitivity", dist.Beta(torch.tensor([8.0, 9.0]), 2.0).to_event(1))
        specificity = pyro.sample("specificity", dist.Beta(torch.tensor([8.0, 9.0]), 1.0).to_event(1))
        with pyro.plate("patients", len(tests)):
            ill = pyro.sample("ill", dist.Bernoulli(prevalence)).unsqueeze(-1)
            pyro.sample("tests", dist.Bernoulli(ill * sensitivity + (1 - ill) * (1 - specificity)).to_event(1), obs=tests)

    return Foreign(model, (torch.tensor([[0.0, 0], [1, 1], [0, 1], [1, 0]]),), plates=("patients",))


@foreign
def hearts() -> Foreign:
    """BUGS volume 1, "Hearts": premature contractions before and after a drug; some patients are cured for good."""

    def model(after, total):
        alpha = pyro.sample("alpha", dist.Normal(0.0, 2.0))
        delta = pyro.sample("delta", dist.Normal(0.0, 2.0))
        with pyro.plate("patients", len(after)):
            uncured = pyro.sample("state", dist.Bernoulli(torch.sigmoid(delta)))
            pyro.sample("y", dist.Binomial(total, torch.sigmoid(alpha) * uncured), obs=after)

    return Foreign(model, (torch.tensor([5.0, 0, 2, 0]), torch.tensor([11.0, 11, 17, 22])), plates=("patients",))


@foreign
def biopsies() -> Foreign:
    """BUGS volume 2, "Biopsies": grades of several biopsies and the true state, which can only be at least as bad."""

    def model(grades):
        p = pyro.sample("p", dist.Dirichlet(torch.ones(3)))
        error = pyro.sample("error", dist.Dirichlet(torch.ones(3, 3)).to_event(1))
        error = error.tril() / error.tril().sum(-1, keepdim=True)
        with pyro.plate("data", len(grades)):
            true = pyro.sample("true", dist.Categorical(p))
            pyro.sample("biopsies", dist.Multinomial(3, probs=error[true]), obs=grades)

    return Foreign(model, (torch.tensor([[3.0, 0, 0], [1, 2, 0], [1, 1, 1], [0, 2, 1]]),))


@foreign
def cervix() -> Foreign:
    """BUGS volume 2, "Cervix": herpes as a risk, with a precise test for some and an error-prone one for all."""

    def model(case, inaccurate, accurate, known):
        q = pyro.sample("q", dist.Beta(1.0, 1.0))
        beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 3.0).to_event(1))
        phi = pyro.sample("phi", dist.Beta(torch.ones(2, 2), torch.ones(2, 2)).to_event(2))
        with pyro.plate("data", len(case)):
            x = pyro.sample("x", dist.Bernoulli(q), obs=accurate, obs_mask=known)
            d = pyro.sample("d", dist.Bernoulli(logits=beta[..., 0] + beta[..., 1] * x), obs=case)
            pyro.sample("w", dist.Bernoulli(Vindex(phi)[x.long(), d.long()]), obs=inaccurate)

    case, inaccurate = torch.tensor([1.0, 0, 1, 0]), torch.tensor([1.0, 1, 0, 0])
    return Foreign(model, (case, inaccurate, torch.tensor([1.0, 0, 0, 0]), torch.tensor([True, True, False, False])))


@foreign
def randomised_response() -> Foreign:
    """Warner's randomised response: a spinner decides which of two opposite questions is answered."""

    def model(yes):
        guilty_rate = pyro.sample("guilty_rate", dist.Beta(1.0, 1.0))
        with pyro.plate("data", len(yes)):
            guilty = pyro.sample("guilty", dist.Bernoulli(guilty_rate))
            spinner = pyro.sample("spinner", dist.Bernoulli(0.7))
            truth = spinner * guilty + (1 - spinner) * (1 - guilty)
            pyro.sample("yes", dist.Bernoulli(0.99 * truth + 0.005), obs=yes)

    return Foreign(model, (torch.tensor([1.0, 0.0, 0.0]),))


@foreign
def survey_non_response() -> Foreign:
    """Non-response that depends on the answer (missing not at random): the answer is latent where nobody answered."""

    def model(answers, responded):
        support = pyro.sample("support", dist.Beta(2.0, 2.0))
        response = pyro.sample("response", dist.Beta(torch.tensor([5.0, 8.0]), torch.tensor([5.0, 2.0])).to_event(1))
        with pyro.plate("data", len(answers)):
            y = pyro.sample("y", dist.Bernoulli(support), obs=answers, obs_mask=responded > 0)
            pyro.sample("responded", dist.Bernoulli(response[..., y.long()]), obs=responded)

    return Foreign(model, (torch.tensor([1.0, 0, 0, 1]), torch.tensor([1.0, 1, 0, 0])))


@foreign
def discrete_imputation() -> Foreign:
    """NumPyro's tutorial "Bayesian imputation for missing values in discrete covariates": A and B cause C, B is missing at times."""

    def model(a, b, c, known):
        prob_a, prob_b = pyro.sample("prob_A", dist.Dirichlet(torch.ones(3))), pyro.sample("prob_B", dist.Dirichlet(torch.ones(3)))
        effect_a = pyro.sample("effect_A", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        effect_b = pyro.sample("effect_B", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("data", len(a)):
            a = pyro.sample("A", dist.Categorical(prob_a), obs=a)
            b = pyro.sample("B", dist.Categorical(prob_b), obs=b, obs_mask=known)
            pyro.sample("C", dist.Normal(effect_a[..., a] + effect_b[..., b], 1.0), obs=c)

    return Foreign(model, (torch.randint(3, (5,)), torch.randint(3, (5,)), torch.randn(5), torch.arange(5) % 2 == 0))


@foreign
def noisy_labels() -> Foreign:
    """Logistic regression under label noise: the true class is latent, flips are learnt."""

    def model(x, labels):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        flip = pyro.sample("flip", dist.Beta(1.0, 9.0).expand([2]).to_event(1))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Bernoulli(logits=(x * weight).sum(-1)))
            pyro.sample("label", dist.Bernoulli(z * (1 - flip[..., 1]) + (1 - z) * flip[..., 0]), obs=labels)

    return Foreign(model, (torch.randn(5, 2), torch.bernoulli(torch.full((5,), 0.5))))
