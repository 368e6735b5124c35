"""An oracle: the forward pass of a SAN in as many digits as wanted, plainly, from the definitions.

It shares no code with rc_lib: it reads the weights of a network and works on lists of mpmath numbers.
"""

import mpmath as mp
import torch


def numbers(T):
    """A tensor as nested lists of mpf; a float64 converts exactly."""
    return [numbers(t) for t in T] if T.ndim else mp.mpf(T.item())


def product(A, B):
    columns = list(zip(*B, strict=True))
    return [[mp.fdot(row, column) for column in columns] for row in A]


def plus(A, B):
    return [[a + b for a, b in zip(r, s, strict=True)] for r, s in zip(A, B, strict=True)]


def plus_row(A, b):
    return [[a + c for a, c in zip(row, b, strict=True)] for row in A]


def transposed(A):
    return [list(column) for column in zip(*A, strict=True)]


def softmax(row, may):
    top = max(x for x, m in zip(row, may, strict=True) if m)
    powers = [mp.exp(x - top) if m else mp.mpf(0) for x, m in zip(row, may, strict=True)]
    total = mp.fsum(powers)
    return [p / total for p in powers]


def attention(layer, X, may):
    """``Σ_h softmax(Q_h K_hᵀ / √d_qk) V_h W_O,h + 1 b_Oᵀ``; ``may`` is one boolean matrix per head."""
    total = [[mp.mpf(0)] * layer.W_O.shape[-1] for _ in X]
    for h in range(layer.W_Q.shape[0]):
        Q, K, V = (
            plus_row(product(X, numbers(W[h])), numbers(b[h]))
            for W, b in ((layer.W_Q, layer.b_Q), (layer.W_K, layer.b_K), (layer.W_V, layer.b_V))
        )
        root = mp.sqrt(layer.W_Q.shape[-1])
        scores = [[s / root for s in row] for row in product(Q, transposed(K))]
        P = [softmax(row, m) for row, m in zip(scores, may[h], strict=True)]
        total = plus(total, product(product(P, V), numbers(layer.W_O[h])))
    return plus_row(total, numbers(layer.b_O))


def layer_norm(norm, X):
    weight, bias, rows = numbers(norm.weight), numbers(norm.bias), []
    for row in X:
        mean = mp.fsum(row) / len(row)
        variance = mp.fsum((x - mean) ** 2 for x in row) / len(row)
        std = mp.sqrt(variance + mp.mpf(norm.eps))
        rows.append([(x - mean) / std * g + b for x, g, b in zip(row, weight, bias, strict=True)])
    return rows


ACTIVATIONS = {
    "identity": lambda u: u,
    "relu": lambda u: max(u, mp.mpf(0)),
    "tanh": mp.tanh,
    "gelu": lambda u: u * mp.erfc(-u / mp.sqrt(2)) / 2,
}


def mlp(net, X):
    hidden = plus_row(product(X, numbers(net.W_1)), numbers(net.b_1))
    hidden = [[ACTIVATIONS[net.activation](u) for u in row] for row in hidden]
    return plus_row(product(hidden, numbers(net.W_2)), numbers(net.b_2))


def branch(X, f, skip, norm, place):
    Y = f(layer_norm(norm, X) if place == "pre" else X)
    Y = plus(X, Y) if skip else Y
    return layer_norm(norm, Y) if place == "post" else Y


def step(layer, X, may):
    X = branch(X, lambda Z: attention(layer.attention, Z, may), layer.skip, layer.norm1, layer.norm)
    if layer.mlp is None:
        return X
    return branch(X, lambda Z: mlp(layer.mlp, Z), layer.mlp_skip, layer.norm2, layer.norm)


def states(san, X, digits, mask=None):
    """The ``L + 1`` states of one sequence ``X [n, d]``, nested lists of mpf."""
    n, heads = X.shape[0], san.layers[0].attention.W_Q.shape[0]
    may = torch.ones(n, n, dtype=torch.bool) if mask is None else mask
    may = may.expand(heads, n, n).tolist()
    with mp.workdps(digits), torch.no_grad():
        result = [numbers(X)]
        for layer in san.layers:
            result.append(step(layer, result[-1], may))
    return result


def residual(X, digits):
    """Log-norm (mpf) and direction (float64 tensor) of the residual about the mean, composite norm."""
    with mp.workdps(digits):
        means = [mp.fsum(column) / len(X) for column in transposed(X)]
        R = [[x - m for x, m in zip(row, means, strict=True)] for row in X]
        rows = max(mp.fsum(map(abs, row)) for row in R)
        columns = max(mp.fsum(map(abs, column)) for column in transposed(R))
        norm = mp.sqrt(rows * columns)
        direction = torch.tensor([[float(r / norm) for r in row] for row in R], dtype=torch.float64)
        return mp.log(norm), direction
