"""Relatives of Muon+ in a few lines each, made from its links.

They are for matrices only; `whole` makes one of them an optimizer for a whole model. Row and column
mean output unit and input feature, whatever the layout of the parameters.
"""

import optax

import optax_muonplus as omp


def rmnp() -> optax.GradientTransformation:
    """RMNP (arXiv:2603.20527): rows of the momentum get norm 1, and no polar step follows."""
    return optax.chain(omp.momentum(0.95), omp.normalize("row"), omp.scale_by_shape("max"))


def muon_rms_norm() -> optax.GradientTransformation:
    """Muon-RMS-Norm (xTimeCrystal): rows of the polar factor get the root mean square 0.2."""
    return optax.chain(
        omp.momentum(0.95, nesterov=True),
        omp.orthogonalize(),
        omp.normalize("row"),
        omp.scale_by_shape(consistent_rms=0.2, norm="row"),
    )


def sink_gd(turns: int = 5) -> optax.GradientTransformation:
    """SinkGD (arXiv:2502.06742): rows, then columns, of the gradient get RMS 1, several times."""
    rows = (omp.normalize("row"), omp.scale_by_shape(consistent_rms=1.0, norm="row"))
    columns = (omp.normalize("col"), omp.scale_by_shape(consistent_rms=1.0, norm="col"))
    return optax.chain(*(rows + columns) * turns)


def whole(
    rule: optax.GradientTransformation, learning_rate: float, weight_decay: float = 0.0
) -> optax.GradientTransformationExtraArgs:
    """A rule for the matrices of a model, with cautious decay, and AdamW for the rest."""
    matrices = optax.chain(
        rule,
        omp.transforms.add_decayed_weights(weight_decay, cautious=True),
        optax.scale_by_learning_rate(learning_rate),
    )
    return optax.partition(
        {"muon": matrices, "adam": optax.adamw(learning_rate)}, omp.partition_labels
    )
