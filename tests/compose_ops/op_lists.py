"""Which operations are left out, and why; which the library gets wrong; which eager itself cannot transform."""

RANDOM = "draws random numbers"
RANDOM_IN_TRAINING = "draws random numbers in training, and is refused for that in evaluation too"
SHAPE = "the shape of a result depends on values"
VALUE = "reads a value to check its arguments, so it is not one graph"
WRITES = "writes to the running statistics that it is given"
SPARSE = "takes or gives a sparse tensor"

SKIPS = {
    "_batch_norm_with_update": WRITES,
    "bernoulli": RANDOM,
    "combinations": SHAPE,
    "corrcoef": VALUE,
    "cov": VALUE,
    "linalg.lstsq": SHAPE,
    "linalg.lstsq.grad_oriented": SHAPE,
    "masked_select": SHAPE,
    "nn.functional.ctc_loss": SHAPE,
    "nn.functional.fractional_max_pool2d": RANDOM,
    "nn.functional.fractional_max_pool3d": RANDOM,
    "nn.functional.gaussian_nll_loss": VALUE,
    "nn.functional.multi_head_attention_forward": RANDOM,
    "nn.functional.rrelu": RANDOM_IN_TRAINING,
    "normal": RANDOM,
    "normal.number_mean": RANDOM,
    "pca_lowrank": RANDOM,
    "sparse.mm.reduce": SPARSE,
    "sparse.sampled_addmm": SPARSE,
    "svd_lowrank": RANDOM,
    "to_sparse": SPARSE,
}

# Transform -> how eager itself refuses it, and for which operations. Checked: eager does refuse them, and no others.
EAGER_CANNOT = {
    "vjp": (
        "must override the setup_context",
        ("nn.functional.linear_cross_entropy.chunked", "nn.functional.linear_cross_entropy.chunked_none"),
    ),
    "vmap": ("[Bb]atching rule", ("as_strided_scatter", "column_stack")),
    "jvp": (
        r"Trying to use forward AD with \w+ that does not support it",
        (
            "_segment_reduce.lengths",
            "_segment_reduce.offsets",
            "cdist",
            "cholesky",
            "grid_sampler_2d",
            "grid_sampler_3d",
            "index_reduce.amax",
            "index_reduce.amin",
            "index_reduce.mean",
            "index_reduce.prod",
            "native_dropout_backward",
            "nn.functional.embedding_bag",
            "nn.functional.grid_sample",
            "nn.functional.multi_margin_loss",
            "nn.functional.multilabel_margin_loss",
            "nn.functional.pdist",
            "ormqr",
        ),
    ),
}
