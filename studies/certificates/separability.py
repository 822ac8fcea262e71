"""What one attention layer can fit: a certificate for sets of labelled token sequences.

The sequences end in the same token and are read at the last position. ``phi(i)`` is the indicator
vector of the pairs (position, token) of sequence i. A one-layer ReLU attention-only model with a
linear classifier fits all labels iff the phi(i) are strictly linearly multiclass separable:

* necessary, since the last column is the same for all sequences, so that each logit is a sum over
  positions of a function of the token there (Chen & Zou 2024, eq 8 and Prop 8) [derived];
* sufficient, since head p can attend to position p alone (Lemma 1) and write any function of the
  token there (the compact form of Theorem 1) [derived].

By Gordan's theorem there is otherwise a witness, an integer matrix that no one-layer model can
satisfy. Both answers are checked in exact integers before they are given; no tolerance decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

from infoflow_lens.foundation.display import Displayed
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.progress import progress_bar
from infoflow_lens.foundation.settings import Count, checked
from infoflow_lens.studies.certificates.exact import (
    exact_arithmetic,
    independent_rows,
    integer_kernel,
)
from infoflow_lens.studies.certificates.separation import (
    Integers,
    Multipliers,
    Problem,
    Sequences,
    add_features,
    decide,
    exact_margin,
    is_witness,
)

# NumPy 2.0 has no default for the type of an array, and jaxtyping takes no other than the class
Tokens = (
    Int[Tensor, "batch pos"]
    | Int[np.ndarray, "batch pos"]  # type: ignore[type-arg, unused-ignore]
    | Sequence[Sequence[int]]
)
Labels = (
    Int[Tensor, " batch"]
    | Int[np.ndarray, " batch"]  # type: ignore[type-arg, unused-ignore]
    | Sequence[int]
)


MAX_SEQUENCES = 5000

_MOST_WEIGHTS = 3 * 10**8  # feature times class: 2.4 GB of int64

# What comes in


def _integers(values: Any, name: str, ndim: int) -> Integers:
    """Return `values` as int64 [batch, pos] or [batch]; an error names what is wrong."""
    if isinstance(values, Tensor):
        if values.is_floating_point():
            values = values.float()  # NumPy has no bfloat16
        values = values.detach().cpu().numpy()
    if not isinstance(values, np.ndarray):
        values = list(values)
        # rows of different lengths would become an array of lists
        if ndim == 2:
            for i, row in enumerate(values):
                if isinstance(row, str) or not hasattr(row, "__len__"):
                    raise InfoFlowError(
                        f"{name}[{i}] is {row!r}: expected a sequence of token ids, one a position"
                    )
            lengths = sorted({len(row) for row in values})
            if len(lengths) > 1:
                raise InfoFlowError(
                    f"{name} has sequences of lengths {_few(lengths)}: expected one length; cut or "
                    "pad them to it"
                )
        values = np.array(values) if values else np.empty((0,) * ndim, dtype=np.int64)
    if values.ndim != ndim:
        axes = "[batch, pos]" if ndim == 2 else "[batch]"
        raise InfoFlowError(f"{name} has shape {tuple(values.shape)}: expected integers {axes}")
    # numbers of another kind are named before they are rounded
    if values.dtype.kind not in "iu":
        flat = values.ravel().tolist()
        if not flat:
            raise InfoFlowError(f"{name} has shape {tuple(values.shape)}: expected some integers")
        bad = next((v for v in flat if isinstance(v, bool) or not isinstance(v, int)), flat[0])
        raise InfoFlowError(
            f"{name} holds {bad!r} ({values.dtype}): expected integers; give ids, such as those of "
            "a ClassLabel or a tokenizer"
        )
    result: Integers = values.astype(np.int64)
    if result.size and (least := np.min(result)) < 0:
        raise InfoFlowError(
            f"{name} holds {least}: expected ids of 0 or more; -1 is often a missing value, "
            "remove such sequences"
        )
    return result


def _few(values: Sequence[Any]) -> str:
    first = ", ".join(map(str, values[:5]))
    return first + (", ..." if len(values) > 5 else "")


def _column(dataset: Any, name: str) -> Any:
    if name not in dataset.column_names:
        raise InfoFlowError(
            f"the dataset has columns {list(dataset.column_names)}, without {name}: rename its "
            "columns to x (token ids) and y (label)"
        )
    return dataset.with_format(None)[:][name]


def _check_number(n: int, max_sequences: int) -> None:
    """Refuse an empty set, and one beyond the limit."""
    if n == 0:
        raise InfoFlowError("the dataset is empty: expected at least one sequence")
    if n > max_sequences:
        raise InfoFlowError(
            f"the dataset has {n} sequences: expected at most {max_sequences}; take a subset, or "
            f"raise max_sequences"
        )


def _parse_tokens(values: Any, max_sequences: int) -> Sequences:
    _check_number(len(values), max_sequences)
    tokens = _integers(values, "x", 2)
    if tokens.shape[1] == 0:
        raise InfoFlowError("the sequences of x have no token: expected at least one, the last")
    last = np.unique(tokens[:, -1])
    if len(last) > 1:
        raise InfoFlowError(
            f"the sequences of x end in tokens {_few(last.tolist())}: expected the same last token "
            "(a CLS or response sign), for only then is the last column constant; append one"
        )
    return add_features(tokens)


def _parse(dataset: Any, max_sequences: int) -> tuple[Problem, tuple[int, ...]]:
    """Return the problem and its labels, sorted."""
    # a DatasetDict has columns, too, but those of several datasets
    if isinstance(dataset, dict) and hasattr(dataset, "column_names"):
        raise InfoFlowError(
            f"the dataset is a {type(dataset).__name__} of splits {list(dataset)}: expected one "
            "split, such as dataset['train']"
        )
    if hasattr(dataset, "column_names") and not hasattr(dataset, "__len__"):
        raise InfoFlowError(
            f"the dataset is an endless {type(dataset).__name__}: expected a finite set; take a "
            "datasets.Dataset, or list(dataset.take(n))"
        )
    # a dataset, or a pair of arrays
    if hasattr(dataset, "column_names"):
        _check_number(len(dataset), max_sequences)
        x, y = _column(dataset, "x"), _column(dataset, "y")
    elif isinstance(dataset, (tuple, list)) and len(dataset) == 2:
        x, y = dataset
    else:
        raise InfoFlowError(
            f"the dataset is {type(dataset).__name__}: expected a datasets.Dataset with columns x "
            "and y, or a pair (x, y) of integers [batch, pos] and [batch]"
        )
    for name, values in (("x", x), ("y", y)):
        if not hasattr(values, "__len__") or getattr(values, "ndim", 1) == 0:
            raise InfoFlowError(
                f"{name} is {values!r}: expected integers [batch, pos] for x and [batch] for y"
            )
    if len(x) != len(y):
        raise InfoFlowError(f"x has {len(x)} sequences but y has {len(y)} labels: expected as many")
    sequences = _parse_tokens(x, max_sequences)
    labels, index = np.unique(_integers(y, "y", 1), return_inverse=True)
    problem = Problem(sequences, index.reshape(-1), len(labels))
    # more weights than this take longer than anybody waits
    if (size := len(sequences.features) * len(labels)) > _MOST_WEIGHTS:
        raise InfoFlowError(
            f"{len(sequences.features)} pairs (position, token) times {len(labels)} classes are "
            f"{size} weights: expected at most {_MOST_WEIGHTS}; take fewer or shorter sequences"
        )
    return problem, tuple(labels.tolist())


# The answers


@dataclass(frozen=True, eq=False)
class OneLayerModel:
    """What the one-layer model of given weights answers: a sum of a row of W for every token.

    By Lemma 1 head p of n - 1 attends from the last position to position p alone and writes the row
    of the token there (compact form of Theorem 1) [derived];
    ``infoflow_lens.studies.constructions.certified_model`` hosts that transformer.

    Attributes:
        weights: W, integers.
        features: (position, token) of every row of `weights`; other pairs have weight 0.
        vocabulary: the token ids, in order.
        n_pos: n.
    """

    weights: Int[Tensor, "feature n_class"]
    features: Int[Tensor, "feature 2"]
    vocabulary: Int[Tensor, " d_vocab"]
    n_pos: int

    @property
    def n_heads(self) -> int:
        """M = n - 1."""
        return self.n_pos - 1

    @property
    def d_model(self) -> int:
        """Rows of the state: d + n + number of classes."""
        return len(self.vocabulary) + self.n_pos + self.weights.shape[1]

    def __call__(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch n_class"]:
        """Return the logits of the classifier on the last position, float64.

        Raises:
            InfoFlowError: for another length, or a token that the vocabulary does not have.
        """
        if tokens.ndim != 2 or tokens.shape[1] != self.n_pos or len(tokens) == 0:
            raise InfoFlowError(
                f"tokens have shape {tuple(tokens.shape)}: expected [batch, {self.n_pos}], batch "
                "at least 1"
            )
        tokens = tokens.to(torch.int64).contiguous()
        # a token beyond the largest gets the last place, and is then found to be unknown
        index = torch.searchsorted(self.vocabulary, tokens).clamp(max=len(self.vocabulary) - 1)
        # W has no row for a token that was in no sequence
        unknown = tokens[self.vocabulary[index] != tokens]
        if len(unknown):
            raise InfoFlowError(
                f"token {int(unknown[0])} is in no sequence of the set: expected one of its "
                f"{len(self.vocabulary)} tokens, the model has no row for others"
            )
        logits = torch.zeros(len(tokens), self.weights.shape[1], dtype=torch.float64)
        # the row of W of each position and token, -1 where no sequence has this pair
        row = torch.full((self.n_pos, len(self.vocabulary)), -1)
        position, token = self.features.T
        row[position, torch.searchsorted(self.vocabulary, token.contiguous())] = torch.arange(
            len(self.features)
        )
        for source in range(self.n_heads):
            rows = row[source, index[:, source]]
            known = rows >= 0
            logits[known] += self.weights[rows[known]].double()
        return logits


@dataclass(frozen=True)
class Witness:
    """A nonzero integer matrix Lambda [sequence, class] that excludes one layer; sparse.

    ``Phi^T Lambda = 0``, ``Lambda[i, y_i] >= 0``, ``Lambda[i, c] <= 0`` for c != y_i, and rows sum
    to 0 (Gordan's theorem) [derived]. Any logits of one layer are ``Phi W``, so that ``sum Lambda *
    logits`` is 0; it would be positive if every sequence were right.

    Attributes:
        rows: sequences, one for every nonzero entry.
        columns: classes, as indices of `classes`.
        values: the entries; Python integers, of any size.
        n_sequences: N.
        classes: the labels that occur, sorted.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    values: tuple[int, ...]
    n_sequences: int
    classes: tuple[int, ...]

    @property
    def support(self) -> tuple[int, ...]:
        """The sequences that it uses: at least one of them is wrong in every one-layer model."""
        return tuple(sorted(set(self.rows)))

    def dense(self) -> NDArray[Any]:
        """Return Lambda as an array [sequence, class] of Python integers (dtype object)."""
        matrix = np.zeros((self.n_sequences, len(self.classes)), dtype=object)
        matrix[list(self.rows), list(self.columns)] = self.values
        return matrix


@dataclass(frozen=True, eq=False)
class OneLayerCertificate(Displayed):
    """Whether one attention layer can fit a set of sequences, and the proof.

    Attributes:
        feasible: whether it can.
        n_sequences: N.
        n_pos: n.
        classes: the labels that occur, sorted; logits and columns are in this order.
        weights: W, an integer for every feature and class, if feasible.
        features: (position, token) of every row of `weights`; the last position needs none.
        margin: the least (W[y_i] - W[c]) . phi_i over i and c != y_i, exact; None for one class.
        model: what the transformer of these weights answers.
        witness: if not feasible, the proof of it.
        contradiction: two equal sequences with different labels, if there are any; then no model
            of any depth fits.
    """

    feasible: bool
    n_sequences: int
    n_pos: int
    classes: tuple[int, ...]
    weights: Int[Tensor, "feature n_class"] | None = None
    features: Int[Tensor, "feature 2"] | None = None
    margin: int | None = None
    model: OneLayerModel | None = None
    witness: Witness | None = None
    contradiction: tuple[int, int] | None = None

    @property
    def holds_for(self) -> str:
        """The attention kinds and head counts for which the verdict holds."""
        if self.contradiction is not None:
            return "every model: equal sequences have different labels"
        if self.margin is None and self.feasible:
            return "every model: there is one class"
        if self.feasible:
            return (
                f"one layer of ReLU attention with {self.n_pos - 1} heads or more, without MLP or "
                "normalisation, and a linear classifier on the last position; nothing is said of "
                "fewer heads, nor of softmax attention"
            )
        return (
            "one layer of ReLU attention with any number of heads and any width, and one layer of "
            "softmax attention with a single head, without MLP or normalisation, and a linear "
            "classifier on the last position; it does not hold for softmax attention with several "
            "heads, which can fit sets that this excludes"
        )

    @property
    def accuracy_bound(self) -> Fraction:
        """The most that one layer can reach on the witness's m sequences, drawn evenly: 1 - 1/m.

        1 if feasible. Sequences outside the witness are not counted. [derived, as in Sec. 13.1]
        """
        if self.witness is None:
            return Fraction(1)
        return 1 - Fraction(1, len(self.witness.support))

    def describe(self) -> str:
        """Return the verdict, its proof and its reach, in a few lines."""
        head = (
            f"{self.n_sequences} sequences of {self.n_pos} tokens, {len(self.classes)} classes: "
            f"one attention layer {'fits' if self.feasible else 'cannot fit'} all labels."
        )
        # three proofs: two equal sequences, integers that cancel, or a model
        if self.contradiction is not None:
            i, j = self.contradiction
            proof = (
                f"Sequences {i} and {j} are equal but have different labels: look for a mistake in "
                "the data."
            )
        elif self.witness is not None:
            largest = max(abs(value) for value in self.witness.values)
            size = str(largest) if largest < 10**12 else f"about 2^{largest.bit_length() - 1}"
            support = self.witness.support
            proof = (
                f"Witness: {len(self.witness.values)} integers (largest {size}) on "
                f"{len(support)} sequences ({_few(support)}); not all of these can be right, so "
                f"accuracy on them is at most {self.accuracy_bound}."
            )
        elif self.margin is None:
            proof = "There is one class only, so every model is right."
        else:
            proof = (
                f"Model: {self.n_pos - 1} heads, integer weights with margin {self.margin}; it is "
                "right on every sequence, by exact integers."
            )
        return "\n".join([head, proof, f"Holds for {self.holds_for}."])

    def __str__(self) -> str:
        return self.describe()


def check_witness(x: Tokens, y: Labels, witness: Any) -> bool:
    """Say whether `witness` excludes one layer on these sequences, in exact integers.

    Checks that it is not zero, that rows sum to 0, the signs, and ``Phi^T Lambda = 0`` for all
    positions (Gordan's theorem) [derived].

    Args:
        x: token ids [batch, pos]; a tensor, an array or lists.
        y: labels [batch].
        witness: a :class:`Witness`, or a dense or scipy-sparse matrix of integers [batch, class]
            whose columns are the labels that occur, sorted.

    Raises:
        InfoFlowError: for bad sequences or labels, or a matrix of another shape or not of integers.
    """
    # to check is cheap, so that the limit of sequences does not hold
    problem, classes = _parse((x, y), max(MAX_SEQUENCES, len(x)))
    shape = (len(problem), problem.n_classes)
    if isinstance(witness, Witness):
        given: tuple[int, ...] = (witness.n_sequences, len(witness.classes))
        entries = list(zip(witness.rows, witness.columns, witness.values, strict=True))
        if witness.classes != classes:
            return False
    else:
        given, entries = _entries(witness)
    if given != shape:
        raise InfoFlowError(
            f"the witness has shape {list(given)}: expected {list(shape)}, one row a sequence and "
            "one column a label that occurs"
        )
    return is_witness(problem, entries)


def _entries(matrix: Any) -> tuple[tuple[int, ...], list[tuple[int, int, int]]]:
    if isinstance(matrix, Tensor):
        matrix = matrix.detach().cpu().numpy()
    if sparse.issparse(matrix):
        matrix = matrix.tocoo()
        shape, rows, columns, values = matrix.shape, matrix.row, matrix.col, matrix.data.tolist()
    else:
        matrix = np.asarray(matrix)
        shape, (rows, columns) = matrix.shape, matrix.nonzero() if matrix.ndim == 2 else ((), ())
        values = matrix[rows, columns].tolist() if matrix.ndim == 2 else []
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool):
            raise InfoFlowError(f"the witness holds {value!r}: expected integers")
    return tuple(shape), list(zip(map(int, rows), map(int, columns), values, strict=True))


# The certificate


@checked
def one_layer_certificate(
    dataset: Any, *, max_sequences: Count = MAX_SEQUENCES, progress: bool = False
) -> OneLayerCertificate:
    """Decide whether one attention layer can fit all labels, by model or witness (II.3) [derived].

    Sharpens Props 7 and 8 of Chen & Zou 2024: dependent sequences are an obstruction only if the
    signs of a dependence go with the labels. Tries sums over classes as weights; then descent on
    squared hinges; then linear programs, first on a few classes. Every answer is checked in
    integers.

    Args:
        dataset: a ``datasets.Dataset`` with columns x (token ids, all of one length and with the
            same last token) and y (label), or a pair (x, y) of integers [batch, pos] and [batch].
        max_sequences: the most sequences to take on.
        progress: whether to show a bar.

    Raises:
        InfoFlowError: for input that is no such set (tokens or labels that are not integers of 0
            or more, several lengths or last tokens, no sequence, too many), or if neither answer
            could be checked in integers; without python-flint (extra ``certificates``).
    """
    exact_arithmetic()  # before the work that would need it
    problem, classes = _parse(dataset, max_sequences)
    n, n_pos = problem.sequences.tokens.shape
    with progress_bar("one-layer certificate", total=1, show=progress) as advance:
        answer = decide(problem, advance)
        if isinstance(answer, Multipliers):
            witness = _as_witness(problem, classes, answer)
            advance(1, "infeasible")
            pair = witness.support if len(witness.support) == 2 else None  # only equal ones cancel
            return OneLayerCertificate(
                False, n, n_pos, classes, witness=witness, contradiction=pair
            )
        sequences = problem.sequences
        model = OneLayerModel(
            torch.from_numpy(answer),
            torch.from_numpy(sequences.features),
            torch.from_numpy(np.unique(sequences.tokens)),
            n_pos,
        )
        # the weights are integers, so the margin is exact
        margin = exact_margin(problem, answer) if len(classes) > 1 else None
        advance(1, "feasible")
    return OneLayerCertificate(
        True, n, n_pos, classes, model.weights, model.features, margin, model
    )


def _as_witness(problem: Problem, classes: tuple[int, ...], found: Multipliers) -> Witness:
    entries: dict[tuple[int, int], int] = {}
    for row, column, value in zip(found.rows.tolist(), found.columns.tolist(), found.values):
        own = int(problem.y[row])
        # a multiplier of a pair adds to the own class what it takes from the other
        entries[row, own] = entries.get((row, own), 0) + value
        entries[row, column] = entries.get((row, column), 0) - value
    triples = [(row, column, value) for (row, column), value in sorted(entries.items())]
    if not is_witness(problem, triples):
        raise RuntimeError("internal error: the witness fails its check")
    rows, columns, values = zip(*triples, strict=True)
    return Witness(rows, columns, values, len(problem), classes)


# Dependence


@dataclass(frozen=True)
class Dependence(Displayed):
    """Whether sequences are dependent (Def. 3), and one dependence.

    Attributes:
        n_sequences: N.
        rank: of Phi, the indicators of (position, token), last position included. Computed modulo a
            prime, so it is never too large; it is too small only if the prime divides all minors.
        indices: sequences with a coefficient other than 0, of one dependence.
        coefficients: their lambda, Python integers, checked exactly; empty if independent.
    """

    n_sequences: int
    rank: int
    indices: tuple[int, ...]
    coefficients: tuple[int, ...]

    @property
    def dependent(self) -> bool:
        """Say whether integers lambda, not all 0, exist with Phi^T lambda = 0."""
        return bool(self.indices)

    @property
    def n_dependences(self) -> int:
        """The number of linearly independent dependences, N - rank."""
        return self.n_sequences - self.rank

    def combine(
        self,
        outputs: Float[Tensor, "batch ..."],
        normalisers: Float[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "..."]:
        """Add up ``lambda_i Z_i outputs_i``: 0 for every one-layer model (Props 7-10) [stated].

        Args:
            outputs: last states or logits of a one-layer model, a row a sequence. For ReLU
                attention of any number of heads no normalisers are needed (Props 7, 8).
            normalisers: Z_i, the sum of exp(score) over the sources at the last position, for one
                softmax head (Props 9, 10).

        Returns:
            The sum, float64; coefficients are divided by the largest, so that it keeps the scale of
            the outputs.

        Raises:
            InfoFlowError: if the sequences are independent, or for other numbers of rows.
        """
        if not self.indices:
            raise InfoFlowError("the sequences are independent: there is nothing to combine")
        for name, values in (("outputs", outputs), ("normalisers", normalisers)):
            if values is not None and len(values) != self.n_sequences:
                raise InfoFlowError(
                    f"{name} have {len(values)} rows: expected {self.n_sequences}, one a sequence"
                )
        largest = max(abs(value) for value in self.coefficients)
        # integers of any size, whose ratios are floats where they themselves are not
        scaled = [float(Fraction(value, largest)) for value in self.coefficients]
        weights = torch.tensor(scaled, dtype=torch.float64, device=outputs.device)
        index = torch.tensor(self.indices, device=outputs.device)
        if normalisers is not None:
            weights = weights * normalisers.to(weights)[index]
        return torch.tensordot(weights, outputs[index].double(), dims=1)


@checked
def dependence(sequences: Any, *, max_sequences: Count = MAX_SEQUENCES) -> Dependence:
    """Decide whether sequences are dependent; find a dependence if so (Def. 3) [stated].

    It is of two equal sequences, where there are some; else of independent sequences and one more,
    which have one up to scale. It is found in integers.

    Args:
        sequences: a ``datasets.Dataset`` with a column x, a pair (x, y), or x itself: token ids
            [batch, pos], with the same last token.
        max_sequences: the most sequences to take on.

    Raises:
        InfoFlowError: for input that is no such set, or if a dependence must exist but none was
            found in integers; without python-flint (extra ``certificates``).
    """
    exact_arithmetic()
    if hasattr(sequences, "column_names"):
        _check_number(len(sequences), max_sequences)
        sequences = _column(sequences, "x")
    elif isinstance(sequences, tuple) and len(sequences) == 2 and np.ndim(sequences[0]) == 2:
        sequences = sequences[0]
    parsed = _parse_tokens(sequences, max_sequences)
    n = len(parsed.tokens)
    # the last position adds a constant column: it matters only if there is no other position
    phi = parsed.phi() if parsed.tokens.shape[1] > 1 else sparse.csr_matrix(np.ones((n, 1)))
    pivots = independent_rows(phi)
    if len(pivots) == n:
        return Dependence(n, n, (), ())
    _, first, index = np.unique(parsed.tokens, axis=0, return_index=True, return_inverse=True)
    # a sequence that occurs twice is the shortest dependence
    again = np.flatnonzero(first[index.reshape(-1)] != np.arange(n))
    if len(again):
        i = int(again[0])
        return Dependence(n, len(pivots), (int(first[index.reshape(-1)[i]]), i), (1, -1))
    found = _find_dependence(phi, pivots)
    if found is None:
        raise InfoFlowError(
            f"{n} sequences have rank {len(pivots)}, so they are dependent, but no dependence was "
            "found in integers; take fewer sequences"
        )
    return Dependence(n, len(pivots), *found)


def _find_dependence(phi: Any, pivots: Integers) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Find the dependence of independent sequences and one more, in integers.

    Returns:
        Its sequences and their coefficients, or None where these are too large to be found.
    """
    # one dependence, up to scale, as the sequences within the rank have none
    extra = np.setdiff1d(np.arange(phi.shape[0]), pivots)[:1]
    rows = np.sort(np.append(pivots, extra))
    integers = integer_kernel(phi[rows].T.tocsc(), np.ones(len(rows)), positive=False)
    if integers is None:
        return None
    pairs = [(int(row), value) for row, value in zip(rows, integers) if value]
    indices, coefficients = zip(*pairs, strict=True)
    return indices, coefficients
