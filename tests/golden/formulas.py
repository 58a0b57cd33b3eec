"""The formulas of advantages and losses once more, as in their papers, and the numbers they give.

Nothing here is of Treadle: standard library, one token at a time, gradients by finite differences.
`algorithms_test.py` holds Treadle to the numbers in `algorithms.json`. To write them anew, and
review the difference::

    python tests/golden/formulas.py

Notation: x is the reward of a trajectory, r those of its group; p, old and ref are the logarithms
of the probabilities of one sampled token; a is its advantage.
"""

import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "algorithms.json"

Case = dict[str, Any]
Rows = list[list[float]]


# --- advantages: one number per sampled token, in the samples' order ------------------------------


def advantages(step: Case, name: str, settings: Case) -> list[float]:
    """Returns the advantage of every sampled token of a step."""
    gamma, lam = settings.get("gamma", 1.0), settings.get("lam", 1.0)
    if name == "reinforce_plus_plus":
        return whitened(list(returns(step, gamma)))
    if name == "gae":
        return whitened(gae(step, gamma, lam)[0])
    of_trajectory = [TRAJECTORY[name](step, i, settings) for i in range(len(step["rewards"]))]
    tokens = [
        value
        for value, samples in zip(of_trajectory, step["tokens"], strict=True)
        for count in samples
        for _ in range(count)
    ]
    return whitened(tokens) if name == "reinforce_plus_plus_baseline" else tokens


def group(step: Case, i: int) -> list[int]:
    """Returns the numbers of the trajectories in the group of trajectory i."""
    return [j for j, other in enumerate(step["groups"]) if other == step["groups"][i]]


def rewards(step: Case, i: int) -> list[float]:
    """Returns the rewards of the group of trajectory i."""
    return [step["rewards"][j] for j in group(step, i)]


def centred(step: Case, i: int, settings: Case) -> float:
    """Dr. GRPO, equation 3: x - mean(r), where the mean of a group of one is 0."""
    r = rewards(step, i)
    return float(step["rewards"][i] - (statistics.mean(r) if len(r) > 1 else 0.0))


def grpo(step: Case, i: int, settings: Case) -> float:
    """DeepSeekMath, section 4.1.2: (x - mean(r)) / std(r)."""
    r = rewards(step, i)
    std = statistics.stdev(r) if len(r) > 1 else 1.0
    scale = std + 1e-6 if settings.get("norm_by_std", True) else 1.0
    return centred(step, i, settings) / scale


def rloo(step: Case, i: int, settings: Case) -> float:
    """RLOO, section 2.2: x - the mean of the others."""
    others = [step["rewards"][j] for j in group(step, i) if j != i]
    return float(step["rewards"][i] - (statistics.mean(others) if others else 0.0))


def remax(step: Case, i: int, settings: Case) -> float:
    """ReMax, algorithm 1: x - the reward of the greedy trajectory."""
    return float(step["rewards"][i] - step["greedy"][i])


def opo(step: Case, i: int, settings: Case) -> float:
    """OPO, equation 8: x - the mean of r weighted by length."""
    members = group(step, i)
    if len(members) == 1:
        return float(step["rewards"][i])
    lengths = [sum(step["tokens"][j]) for j in members]
    weighted = sum(n * x for n, x in zip(lengths, rewards(step, i), strict=True))
    return float(step["rewards"][i] - weighted / sum(lengths))


def grpo_passk(step: Case, i: int, settings: Case) -> float:
    """Pass@k training, as in verl: of the best alone, (best - second) / std(r)."""
    r = sorted(rewards(step, i))
    if len(r) == 1 or step["rewards"][i] < r[-1]:
        return 0.0
    return (r[-1] - r[-2]) / (statistics.stdev(r) + 1e-6)


def gpg(step: Case, i: int, settings: Case) -> float:
    """GPG, section 3.2: alpha (x - mean(r)), alpha = trajectories / those with a reward."""
    rewarded = sum(x != 0 for x in step["rewards"])
    alpha: float = len(step["rewards"]) / max(1, rewarded)
    return alpha * centred(step, i, settings)


def maxrl(step: Case, i: int, settings: Case) -> float:
    """MaxRL, section 4: (x - mean(r)) / mean(r)."""
    mean = statistics.mean(rewards(step, i))
    return float((step["rewards"][i] - mean) / (mean + 1e-6))


TRAJECTORY: dict[str, Callable[[Case, int, Case], float]] = {
    "dr_grpo": centred,
    "gpg": gpg,
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "maxrl": maxrl,
    "opo": opo,
    "reinforce_plus_plus_baseline": centred,
    "remax": remax,
    "rloo": rloo,
}


def returns(step: Case, gamma: float) -> Iterator[float]:
    """Yields x gamma^k of each sampled token, k tokens before the end. REINFORCE++, section 3."""
    for x, samples in zip(step["rewards"], step["tokens"], strict=True):
        for count in samples:
            yield from (x * gamma ** (count - 1 - t) for t in range(count))


def gae(step: Case, gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """Returns A_t = sum_l (gamma lam)^l delta_{t+l}, and A_t + V_t. GAE, equation 16."""
    left = iter(step["values"])
    found: list[float] = []
    values: list[float] = []
    for x, samples in zip(step["rewards"], step["tokens"], strict=True):
        for count in samples:
            v = [next(left) for _ in range(count)]
            values += v
            delta = [(x if t == count - 1 else gamma * v[t + 1]) - v[t] for t in range(count)]
            found += [
                sum((gamma * lam) ** (u - t) * delta[u] for u in range(t, count))
                for t in range(count)
            ]
    return found, [a + v for a, v in zip(found, values, strict=True)]


def whitened(tokens: list[float]) -> list[float]:
    """(value - mean) / sqrt(variance + 1e-8), the variance unbiased."""
    mean, variance = statistics.mean(tokens), statistics.variance(tokens)
    return [(value - mean) / math.sqrt(variance + 1e-8) for value in tokens]


# --- losses ---------------------------------------------------------------------------------------


def clip(value: float, low: float, high: float) -> float:
    """Returns the value, not below low and not above high."""
    return min(max(value, low), high)


def token_loss(c: Case, p: list[float], now: list[float], t: int, s: list[int]) -> float:
    """The loss of token t.

    Args:
        c: The case: settings and the numbers of all tokens.
        p: The log-probabilities that the gradient is taken of.
        now: The same numbers without a gradient.
        t: Which token.
        s: All tokens of its sample.
    """
    a: float = c["advantages"][t]
    old: list[float] = c["old"]
    low: float = c["clip_low"]
    high: float = c["clip_high"]
    dual: float | None = c["clip_dual"]
    r = math.exp(p[t] - old[t])
    fixed = math.exp(now[t] - old[t])  # r, without a gradient
    match c["loss"]:
        case "ppo":  # PPO, equation 7; dual clip, equation 5
            loss = max(-a * r, -a * clip(r, 1 - low, 1 + high))
            return min(loss, -a * dual) if a < 0 and dual is not None else loss
        case "policy_gradient":
            return -a * p[t]
        case "gspo":  # GSPO, equation 14: sg(s) p / sg(p)
            mean = sum(now[u] - old[u] for u in s) / len(s)
            ratio = math.exp(mean + p[t] - now[t])
            return max(-a * ratio, -a * clip(ratio, 1 - low, 1 + high))
        case "gmpo":  # GMPO, section 3: the gradient of a token is that of the sample, times |s|
            with_t = [p[u] if u == t else now[u] for u in s]
            kept = [
                min(d, clip(d, -low, high)) if a > 0 else max(d, clip(d, -low, high))
                for d in (new - old[u] for new, u in zip(with_t, s, strict=True))
            ]
            without = [
                min(d, clip(d, -low, high)) if a > 0 else max(d, clip(d, -low, high))
                for d in (now[u] - old[u] for u in s)
            ]
            mean = sum(without) / len(s)
            return -a * math.exp(mean + sum(kept) - sum(without))
        case "cispo":  # MiniMax-M1, equations 4 and 5
            return -clip(fixed, 1 - low, 1 + high) * a * p[t]
        case "clip_cov":
            if c["selected"][t]:
                return 0.0
            return max(-a * r, -a * clip(r, 1 - low, 1 + high))
        case "kl_cov":
            coefficient: float = c["kl_coef_cov"] if c["selected"][t] else 0.0
            return -a * r + coefficient * abs(p[t] - old[t])
        case "dppo_tv" | "dppo_kl":  # DPPO, binary approximations
            n, q = math.exp(now[t]), math.exp(old[t])
            apart = (
                n - q
                if c["loss"] == "dppo_tv"
                else math.copysign(
                    q * math.log(q / n) + (1 - q) * math.log((1 - q) / (1 - n)), n - q
                )
            )
            if (a > 0 and apart > high) or (a <= 0 and apart < -low):
                return 0.0
            return -min(fixed, fixed if dual is None else dual) * a * p[t]
        case "distillation":  # the advantage is log p_teacher - log p
            teacher: float = c["ref"][t] - now[t]
            return max(-teacher * r, -teacher * clip(r, 1 - low, 1 + high))
    raise ValueError(c["loss"])


def kl(kind: str, p: float, ref: float) -> float:
    """Schulman's estimators of KL(policy || reference)."""
    d = ref - p
    return {
        "k1": -d,
        "k2": d * d / 2,
        "k3": math.exp(d) - 1 - d,
        "abs": abs(d),
    }[kind]


def penalty(kind: str, p: float, now: float, ref: float) -> float:
    """With a +, the value of the estimator and the gradient of k2."""
    if not kind.endswith("+"):
        return kl(kind, p, ref)
    return kl(kind[:-1], now, ref) + kl("k2", p, ref) - kl("k2", now, ref)


def weight(c: Case, t: int, s: list[int]) -> float:
    """What the off-policy correction multiplies the loss of token t by."""
    logs = [
        0.0 if c["stale_only"] and not c["stale"][u] else c["old"][u] - c["rollout"][u] for u in s
    ]
    own = logs[s.index(t)]
    result = 1.0
    if c["weights"] != "none":
        w = math.exp(own if c["weights"] == "token" else sum(logs))
        inside = c["low"] <= w <= c["high"]
        result = w if inside else clip(w, c["low"], c["high"]) if c["truncate"] else 0.0
    for name, bounds in c["reject"].items():
        where, how, kind = ["", *name.split("_")] if name.startswith("token") else name.split("_")
        values = [v if kind == "k1" else kl(kind, 0.0, v) for v in logs]
        if where == "":
            value = values[s.index(t)]
        else:
            value = {"sum": sum(values), "max": max(values), "mean": statistics.fmean(values)}[how]
        outside = (
            not math.log(bounds[0]) <= value <= math.log(bounds[1])
            if kind == "k1"
            else value > bounds[0]
        )
        if outside:
            return 0.0
    if c["veto"] is not None and min(logs) < math.log(c["veto"]):
        return 0.0
    return result


def share(c: Case, t: int, s: list[int]) -> float:
    """The weight of token t in the sum over the mini-batch; every sample is a trajectory."""
    n, total = len(c["lengths"]), sum(c["lengths"])
    return {
        "token-mean": 1 / total,
        "token-sum": 1.0,
        "seq-mean-token-sum": 1 / n,
        "seq-mean-token-mean": 1 / (n * len(s)),
        "seq-mean-token-sum-norm": 1 / (n * (c["aggregation_length"] or 1)),
    }[c["loss_aggregation"]]


def objective(c: Case, p: list[float], now: list[float]) -> tuple[float, list[float]]:
    """Returns the loss of the mini-batch, and that of each token before it is reduced."""
    stops = list(itertools.accumulate(c["lengths"]))
    samples = [list(range(stop - n, stop)) for n, stop in zip(c["lengths"], stops, strict=True)]
    tokens: list[float] = []
    total = 0.0
    for s in samples:
        for t in s:
            loss = token_loss(c, p, now, t, s) * weight(c, t, s)
            loss += c["kl_coef"] * penalty(c["kl_type"], p[t], now[t], c["ref"][t])
            loss -= c["entropy_coef"] * c["entropy"][t]
            tokens.append(loss)
            total += share(c, t, s) * loss
    return total, tokens


def gradient(c: Case) -> list[float]:
    """The derivative of the loss by each log-probability, by central differences."""
    found = []
    for t, value in enumerate(c["new"]):
        up, down = list(c["new"]), list(c["new"])
        up[t], down[t] = value + 1e-6, value - 1e-6
        found.append((objective(c, up, c["new"])[0] - objective(c, down, c["new"])[0]) / 2e-6)
    return found


def value_loss(c: Case) -> list[float]:
    """max((V - R)^2, (V_clipped - R)^2) / 2."""
    return [
        max((v - r) ** 2, (clip(v, o - c["clip"], o + c["clip"]) - r) ** 2) / 2
        for v, o, r in zip(c["values"], c["old_values"], c["returns"], strict=True)
    ]


# --- the cases ------------------------------------------------------------------------------------

PLAIN: Case = {
    **{"loss": "ppo", "clip_low": 0.2, "clip_high": 0.28, "clip_dual": 3.0, "kl_coef_cov": 0.1},
    **{"kl_coef": 0.0, "kl_type": "k3", "entropy_coef": 0.0},
    **{"loss_aggregation": "token-mean", "aggregation_length": None},
    **{"weights": "none", "low": 0.0, "high": 2.0, "truncate": True, "reject": {}, "veto": None},
    "stale_only": False,
}
LOSSES: dict[str, Case] = {
    **{name: {"loss": name} for name in ("ppo", "policy_gradient", "cispo", "distillation")},
    "ppo without dual clip": {"clip_dual": None},
    "ppo with a low dual clip": {"clip_dual": 1.1},
    "gspo": {"loss": "gspo", "clip_low": 0.05, "clip_high": 0.08},
    "gmpo": {"loss": "gmpo", "clip_low": 0.4, "clip_high": 0.4},
    "clip_cov": {"loss": "clip_cov"},
    "kl_cov": {"loss": "kl_cov"},
    "dppo_tv": {"loss": "dppo_tv", "clip_low": 0.1, "clip_high": 0.1, "clip_dual": 1.3},
    "dppo_kl": {"loss": "dppo_kl", "clip_low": 0.01, "clip_high": 0.01, "clip_dual": 1.3},
    **{
        f"kl {kind}": {"kl_coef": 0.3, "kl_type": kind}
        for kind in ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")
    },
    "entropy": {"entropy_coef": 0.01},
    **{
        mode: {"loss_aggregation": mode}
        for mode in ("token-sum", "seq-mean-token-sum", "seq-mean-token-mean")
    },
    "seq-mean-token-sum-norm": {
        "loss_aggregation": "seq-mean-token-sum-norm",
        "aggregation_length": 16,
    },
    "weights of tokens": {"weights": "token", "low": 0.5, "high": 1.5},
    "weights of tokens, masked": {"weights": "token", "low": 0.5, "high": 1.5, "truncate": False},
    "weights of samples": {"weights": "sample"},
    "weights of stale tokens": {"weights": "token", "stale_only": True},
    "rejected tokens": {"reject": {"token_k1": [0.7, 1.4]}},
    "rejected tokens by k3": {"reject": {"token_k3": [0.1]}},
    "rejected by the geometric mean": {"reject": {"sample_mean_k1": [0.95, 1.2]}},
    "rejected by the sum": {"reject": {"sample_sum_k2": [0.3]}},
    "rejected by the largest": {"reject": {"sample_max_k2": [0.2]}},
    "veto": {"veto": 0.85},
}
ADVANTAGES: dict[str, tuple[str, Case]] = {
    **{name: (name, {}) for name in ("gae", "reinforce_plus_plus", *TRAJECTORY)},
    "grpo without std": ("grpo", {"norm_by_std": False}),
    "reinforce_plus_plus discounted": ("reinforce_plus_plus", {"gamma": 0.9}),
    "gae discounted": ("gae", {"gamma": 0.97, "lam": 0.8}),
}


def _step() -> Case:
    """Four groups, one of equal rewards and one of a single trajectory; some of two samples."""
    draw = random.Random(11)
    sizes = [4, 3, 3, 1]
    groups = [g for g, size in enumerate(sizes) for _ in range(size)]
    tokens = [[draw.randint(1, 5) for _ in range(draw.randint(1, 2))] for _ in groups]
    greedy = [draw.choice([0.0, 1.0, 0.5]) for _ in sizes]
    return {
        "rewards": [1.0, 0.0, 0.25, 1.5, 0.0, 1.0, 0.0, 0.3, 0.3, 0.3, 0.7],
        "groups": groups,
        "tokens": tokens,
        "greedy": [greedy[g] for g in groups],
        "values": [round(draw.uniform(0, 1), 3) for _ in range(sum(map(sum, tokens)))],
    }


def _batch() -> Case:
    draw = random.Random(7)
    lengths = [3, 1, 6, 2, 8]
    old = [round(-0.02 - draw.expovariate(1.0), 3) for _ in range(sum(lengths))]
    of_sample = [1.1, -0.4, 0.0, 0.9, -1.3]

    def near(spread: float) -> list[float]:
        return [round(min(value + draw.gauss(0.0, spread), -0.005), 3) for value in old]

    return {
        "lengths": lengths,
        "advantages": [a for a, n in zip(of_sample, lengths, strict=True) for _ in range(n)],
        "old": old,
        "new": near(0.4),
        "ref": near(0.5),
        "rollout": near(0.3),
        "entropy": [round(draw.uniform(0.0, 3.0), 3) for _ in old],
        "stale": [draw.random() < 0.5 for _ in old],
        "selected": [draw.random() < 0.2 for _ in old],
    }


def _critic() -> Case:
    draw = random.Random(3)
    old = [round(draw.uniform(0.0, 1.0), 3) for _ in range(12)]
    return {
        "old_values": old,
        "values": [round(v + draw.gauss(0.0, 0.3), 3) for v in old],
        "returns": [draw.choice([0.0, 1.0]) for _ in old],
        "clip": 0.2,
    }


def golden() -> Case:
    """Returns inputs and the numbers of the formulas."""
    step, batch, critic = _step(), _batch(), _critic()
    losses = {}
    for name, settings in LOSSES.items():
        case = PLAIN | settings | batch
        total, tokens = objective(case, case["new"], case["new"])
        losses[name] = {
            "settings": PLAIN | settings,
            "loss": total,
            "loss_of_tokens": tokens,
            "gradient": gradient(case),
        }
    return {
        "step": step,
        "advantages": {
            name: {
                "advantage": estimator,
                "settings": settings,
                "of_tokens": advantages(step, estimator, settings),
                **(
                    {"returns": gae(step, settings.get("gamma", 1.0), settings.get("lam", 1.0))[1]}
                    if estimator == "gae"
                    else {}
                ),
            }
            for name, (estimator, settings) in ADVANTAGES.items()
        },
        "batch": batch,
        "losses": losses,
        "critic": critic | {"loss_of_tokens": value_loss(critic)},
    }


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden(), indent=1) + "\n")
