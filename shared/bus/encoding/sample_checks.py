"""Checks across the columns of samples (:class:`penstock.shared.bus.messages.Sample`): lengths, supports, teachers, trees.

All raise ValueError.
"""

import itertools
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from penstock.shared.bus.encoding.columns import Joined

MOST_TEACHER_TOKENS = 64
"""Most probable tokens of a teacher that travel with a position."""
LARGEST_MASS = 1.001
"""Largest sum of probabilities of different tokens: float32 rounds."""


def check_samples(arrays: Mapping[str, Joined]) -> None:
    missing = {"token_ids", "behavior_logprobs", "version_spans"} - arrays.keys()
    if missing:
        raise ValueError(f"expected arrays as {', '.join(sorted(missing))}")
    tokens, spans = arrays["token_ids"].lengths, arrays["version_spans"]
    if "support_sizes" in arrays or "support_ids" in arrays:
        _check_supports(arrays["token_ids"], arrays.get("support_sizes"), arrays.get("support_ids"))
    if "teacher_logprobs" in arrays and tokens != arrays["teacher_logprobs"].lengths:
        raise ValueError("expected one teacher logprob a token, found other lengths")
    if "teacher_top_ids" in arrays or "teacher_top_logprobs" in arrays:
        _check_tops(arrays["token_ids"], arrays.get("teacher_top_ids"), arrays.get("teacher_top_logprobs"))
    if tokens != arrays["behavior_logprobs"].lengths:
        raise ValueError("expected one behavior logprob a token, found other lengths")
    if min(tokens) < 1 or min(spans.lengths) < 1:
        raise ValueError("expected at least one token and one version span in each sample, found fewer")
    if not _ascend(spans.joined[:, 0], spans.lengths, tokens):
        raise ValueError(
            "expected version spans that begin at token 0 and ascend below the sample's length, found others"
        )
    if "segments" in arrays or "turn_rewards" in arrays:
        _check_trees(arrays)


def _check_supports(tokens: Joined, sizes: Joined | None, ids: Joined | None) -> None:
    """Check that each drawn token was possible."""
    if sizes is None or ids is None or any(n not in (0, t) for n, t in zip(sizes.lengths, tokens.lengths, strict=True)):
        raise ValueError("expected a support of every token, or of none, found others")
    if not any(sizes.lengths) and not any(ids.lengths):
        return
    counts = np.abs(sizes.joined.astype(np.int64))
    sums = np.add.reduceat(np.append(counts, 0), np.cumsum([0, *sizes.lengths[:-1]])) * (np.array(sizes.lengths) > 0)
    if sums.tolist() != ids.lengths:
        raise ValueError("expected as many support ids as the sizes say, found others")
    drawn = np.concatenate(
        [np.zeros(0, np.int32), *(part for part, size in zip(tokens.split(), sizes.lengths, strict=True) if size)]
    )
    owner = np.repeat(np.arange(len(counts)), counts)
    hits = np.bincount(owner[ids.joined == drawn[owner]], minlength=len(counts))
    if ((hits > 0) != (sizes.joined > 0))[sizes.joined != 0].any():
        raise ValueError("expected drawn tokens within their support, found others")


def _check_tops(tokens: Joined, ids: Joined | None, logprobs: Joined | None) -> None:
    """Check that each position has as many different tokens, whose probabilities are those of a distribution."""
    if ids is None or logprobs is None or not tokens.lengths == ids.lengths == logprobs.lengths:
        raise ValueError("expected a teacher's most probable tokens and their logprobs at every position, found others")
    if ids.joined.shape != logprobs.joined.shape or not 1 <= ids.joined.shape[1] <= MOST_TEACHER_TOKENS:
        raise ValueError(
            f"expected 1 to {MOST_TEACHER_TOKENS} most probable tokens of a teacher with a logprob each, found "
            f"{ids.joined.shape[1]} with {logprobs.joined.shape[1]}"
        )
    if wrong := no_distribution(ids.joined, logprobs.joined):
        raise ValueError(f"expected a teacher's most probable tokens, found {wrong}")


def no_distribution(ids_NK: npt.NDArray[np.int32], logprobs_NK: npt.NDArray[np.float32]) -> str:  # noqa: N803 (shapes)
    """Return why the rows cannot be tokens of a distribution and their logprobs, or nothing."""
    if (ids_NK[:, 1:] <= ids_NK[:, :-1]).any():
        return "ids that do not ascend"
    largest = float(np.exp(logprobs_NK).sum(1).max(initial=0.0))
    return "" if largest <= LARGEST_MASS else f"probabilities whose sum is {largest:.4g}"


def _ascend(starts: npt.NDArray[np.int32], spans: list[int], tokens: list[int]) -> bool:
    """Whether each sample's spans begin at token 0 and ascend."""
    places = iter(starts.tolist())
    for count, length in zip(spans, tokens, strict=True):
        if (place := next(places)) != 0:
            return False
        for _ in range(count - 1):
            before, place = place, next(places)
            if not before < place < length:
                return False
    return True


def _check_trees(arrays: Mapping[str, Joined]) -> None:
    """Check the segments of each sample that has them: its tree, and that given tokens carry nothing of a draw."""
    none = Joined(np.zeros((0, 3), np.int32), [0] * len(arrays["token_ids"]))
    segments, rewards, sizes = (arrays.get(name, none) for name in ("segments", "turn_rewards", "support_sizes"))
    each = zip(
        arrays["token_ids"].lengths,
        segments.split(),
        rewards.lengths,
        arrays["behavior_logprobs"].split(),
        sizes.split(),
        strict=True,
    )
    for tokens, rows, turns, logprobs, supports in each:
        if not len(rows):
            if turns:
                raise ValueError(f"expected turn rewards of a sample with segments, found {turns} without")
            continue
        _check_tree(rows, tokens)
        is_sampled = rows[:, 2] == 1
        if turns not in (0, int(is_sampled.sum())):
            raise ValueError(f"expected a reward of each of {is_sampled.sum()} sampled segments, found {turns}")
        is_given = np.repeat(~is_sampled, np.diff(np.append(rows[:, 0], tokens)))
        if logprobs[is_given].any() or (len(supports) and supports[is_given].any()):
            raise ValueError("expected behavior logprob 0 and support 0 at given tokens, found others")


def _check_tree(rows: npt.NDArray[np.int32], tokens: int) -> None:
    """Check (first token, parent or −1, sampled) in depth-first order."""
    firsts, parents, kinds = rows.T.tolist()
    if firsts[0] != 0 or firsts[-1] >= tokens or any(b <= a for a, b in itertools.pairwise(firsts)):
        raise ValueError("expected segments that begin at token 0 and ascend below the sample's length, found others")
    if not {0, 1}.issuperset(kinds) or 1 not in kinds:
        raise ValueError("expected given (0) and sampled (1) segments, at least one sampled, found others")
    path: list[int] = []
    for segment, parent in enumerate(parents):
        while path and path[-1] != parent:
            path.pop()
        if parent >= 0 and not path:
            raise ValueError(
                f"expected segments in depth-first order, each after its parent or a descendant of it, found segment {segment} "
                f"with the parent {parent}"
            )
        path.append(segment)
