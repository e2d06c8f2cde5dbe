"""Those of the problems in cases.py whose scores are cosines, and MixCSE's three blocks of them."""

from tests.shared.launches import Case

COSINES = (
    Case(
        "cosines, bf16",
        diagonal="keep",
        row_negatives="given",
        scale=True,
        normalize=True,
        wanted=(
            "inverse_norms_kernel",
            "row_shifts_kernel query_inverse_norms",
            "scores_kernel EPILOGUE=ROW_MAX query_inverse_norms",
            "scores_kernel EPILOGUE=EXP out tile_row_sums query_inverse_norms",
            "row_stats_kernel query_inverse_norms COSINES",
            "gradient_kernel inverse_norms ROW_NEGATIVE=1",
            "gradient_kernel inverse_norms ROW_NEGATIVE=0",
        ),
    ),
    Case(
        "cosines, bf16, D=1000, low, groups, mask, mixed",
        N=4000,
        D=1000,
        memory="low",
        groups=True,
        mask=True,
        row_negatives="mixed",
        normalize=True,
        wanted=(
            "row_shifts_kernel query_inverse_norms",
            "scores_kernel EPILOGUE=EXP row_factors out query_inverse_norms",
            "row_stats_kernel query_inverse_norms query_groups mask",
            "row_products_kernel query_inverse_norms",
            "gradient_kernel inverse_norms ROW_NEGATIVE=2",
        ),
    ),
    Case(
        "cosines, bf16, negatives",
        negatives=64,
        normalize=True,
        wanted=("row_stats_kernel query_inverse_norms negative_inverse_norms",),
    ),
    Case(
        "cosines, tf32",
        dtype="float32",
        normalize=True,
        wanted=("scores_kernel EPILOGUE=EXP out tile_row_sums query_inverse_norms",),
    ),
    Case(
        "cosines, bf16, descriptors",
        descriptors=True,
        normalize=True,
        archs=(90, 100),
        wanted=("scores_kernel EPILOGUE=EXP out tile_row_sums query_inverse_norms DESCRIPTORS",),
    ),
    Case(
        "cosines, sigmoid, bf16, biases",
        bias=True,
        link="sigmoid",
        normalize=True,
        wanted=(
            "scores_kernel EPILOGUE=SIGMOID out tile_row_sums bias tile_column_sums query_inverse_norms",
        ),
    ),
    Case(
        "cosines, sigmoid, tf32, groups, mask",
        dtype="float32",
        bias=True,
        groups=True,
        mask=True,
        link="sigmoid",
        normalize=True,
        wanted=("scores_kernel EPILOGUE=SIGMOID out bias tile_column_sums mask query_inverse_norms",),
    ),
    Case(
        "cosines, both ways, bf16",
        clip=True,
        normalize=True,
        wanted=(
            "scores_kernel EPILOGUE=EXP_ROWS_AND_COLUMNS tile_row_sums query_inverse_norms",
            "scores_kernel EPILOGUE=EXP_ROWS_AND_COLUMNS out row_factors query_inverse_norms",
        ),
    ),
    Case(
        "cosines, both ways, bf16, tuned",
        clip=True,
        normalize=True,
        tuned=True,
        archs=(90,),
        wanted=(
            "scores_kernel EPILOGUE=EXP_ROWS_AND_COLUMNS tile_row_sums query_inverse_norms",
            "scores_kernel EPILOGUE=EXP_ROWS_AND_COLUMNS out row_factors query_inverse_norms",
        ),
    ),
    Case(
        "cosines, both ways, tf32",
        dtype="float32",
        clip=True,
        normalize=True,
        wanted=("scores_kernel EPILOGUE=EXP_ROWS_AND_COLUMNS out row_factors query_inverse_norms",),
    ),
    Case(
        "MixCSE released, bf16",
        three_blocks="both",
        wanted=(
            "three_block_rows_kernel BOTH WEIGHTED",
            "three_block_gradients_kernel BOTH QUERIES CANDIDATES -JOINED -SCALE -SHARES",
        ),
    ),
    Case(
        "MixCSE released, fp16, through mixtures",
        dtype="float16",
        N=4001,
        memory="low",
        three_blocks="both",
        stop_gradient=False,
        weight=0.5,
        scale=True,
        wanted=(
            "three_block_rows_kernel WEIGHT",
            "three_block_gradients_kernel BOTH QUERIES -CANDIDATES JOINED SCALE SHARES",
        ),
    ),
    Case(
        "MixCSE released, fp32, candidates",
        dtype="float32",
        three_blocks="candidates",
        scale=True,
        wanted=("three_block_gradients_kernel -BOTH QUERIES CANDIDATES SCALE",),
    ),
    Case(
        "MixCSE released, bf16, loss",
        three_blocks="candidates",
        gradients=False,
        wanted=("three_block_rows_kernel -BOTH -WEIGHTED",),
    ),
)
