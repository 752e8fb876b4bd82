"""The chain of Muon+, and what row and column mean in the two layouts of parameters."""

import numpy as np

import optax_muonplus as omp
from docs.drawings.canvas import Canvas, Point

CELL = 15


def _matrix(canvas: Canvas, at: Point, entries: np.ndarray, colour: str) -> None:
    """Entries as squares, the larger the darker, with the norm of each row as a bar."""
    largest = np.abs(entries).max()
    norms = np.linalg.norm(entries, axis=1)
    for row, values in enumerate(entries):
        y = at[1] + row * CELL
        for column, value in enumerate(values):
            opacity = 0.08 + 0.92 * abs(value) / largest
            canvas.rect((at[0] + column * CELL, y), (CELL - 1, CELL - 1), colour, opacity=opacity)
        length = 26 * norms[row] / norms.max()
        canvas.rect((at[0] + entries.shape[1] * CELL + 4, y + 3), (length, CELL - 7), "ink")


def chain() -> Canvas:
    """A momentum matrix on its way through the chain, by the library's own functions."""
    random = np.random.default_rng(3)
    momentum = random.normal(size=(8, 4)) * np.exp(random.normal(size=(8, 1)))
    polar = np.asarray(omp.polar.svd(momentum.astype(np.float32)))
    normalized = np.asarray(omp.matrices.normalize_matrix(polar, "col_row"))
    stages = [
        ("momentum", "β M + (1 - β) G", momentum, "soft", "M: average of gradients G"),
        ("polar factor", "U Vᵀ", polar, "one", "all singular values 1"),
        ("columns, then rows", "Norm(U Vᵀ)", normalized, "two", "the step that Muon+ adds"),
        ("scale", "√(out/in)", normalized, "three", "then the learning rate"),
    ]
    words = (
        "The chain of Muon+ on a matrix of eight rows: momentum has rows of unequal norms, and so"
        " has its polar factor. After the normalization all rows have the same norm."
    )
    canvas = Canvas(760, 232, words)
    for index, (name, formula, entries, colour, note) in enumerate(stages):
        left = 34 + index * 190
        canvas.text((left + 46, 24), name, bold=True)
        canvas.text((left + 46, 44), formula, colour="soft")
        _matrix(canvas, (left, 58), entries, colour)
        canvas.text((left + 46, 200), note, colour="soft", size=12)
        if index:
            canvas.arrow((left - 72, 118), (left - 28, 118))
    note = "each bar is the norm of a row, the step size of one output unit"
    canvas.text((380, 224), note, size=12)
    return canvas


def _grid(canvas: Canvas, at: Point, shape: tuple[int, int], row: bool, transposed: bool) -> None:
    """A matrix of cells with one row, or one column, of W coloured."""
    for i in range(shape[0]):
        for j in range(shape[1]):
            output, feature = (j, i) if transposed else (i, j)
            marked = output == 1 if row else feature == 2
            colour = ("one" if row else "two") if marked else "faint"
            canvas.rect((at[0] + j * 22, at[1] + i * 22), (20, 20), colour)


def layouts() -> Canvas:
    """One row and one column of W (out, in) in the arrays of both layouts."""
    words = (
        "A row of W, the weights of one output unit, is a row of an (out, in) array and a column of"
        " an (in, out) kernel; a column of W, the weights of one input feature, the other way"
        " round."
    )
    canvas = Canvas(640, 300, words)
    columns = [
        (40, (3, 5), False, "weight (out, in): PyTorch, Equinox"),
        (360, (5, 3), True, "kernel (in, out): Flax, Haiku"),
    ]
    for left, shape, transposed, title in columns:
        canvas.text((left + 110, 24), title, bold=True)
        for index, row in enumerate((True, False)):
            x = left + index * 130
            _grid(canvas, (x, 70), shape, row, transposed)
            label = "one row" if row else "one column"
            canvas.text((x, 56), label, anchor="start", colour="one" if row else "two")
        across, down = ("out", "in") if transposed else ("in", "out")
        canvas.text((left, 204), f"{down} ↓  {across} →", anchor="start", colour="soft")
    canvas.text((320, 244), "row: the weights of one output unit, |W[i, :]|", colour="one")
    canvas.text((320, 268), "column: the weights of one input feature, |W[:, j]|", colour="two")
    return canvas
