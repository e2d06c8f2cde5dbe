"""The layer `fastqt.nn.GRU`: the interface of `torch.nn.GRU` over `fastqt.nn.gru.sequence`."""

from typing import Literal, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fastqt.checks import shown
from fastqt.nn.gru.sequence import gru_sequence
from fastqt.torch_modes import is_transformed

Bias = bool | Literal["single"]


class GRU(torch.nn.RNNBase):
    """A one-layer gated recurrent unit like `torch.nn.GRU`, but faster on a CPU.

    The parameters have the names and shapes of those of torch.nn.GRU, so that each layer loads the state dict
    of the other. Values and gradients agree up to rounding, and only first derivatives exist. On a CPU, the
    states and sums of 16-bit weights too are in float32. In bfloat16, and under autocast to it, the factors
    of matrix products are rounded to bfloat16 where the CPU multiplies such matrices faster (AMD's with
    AVX512-BF16). On other devices, the reset-after form is torch's own GRU (cuDNN).

    Args:
        input_size: W, the number of features of a token.
        hidden_size: H, the number of features of a state.
        bias: True for the two biases that torch has; False for none; "single" for one trained bias per gate,
            as in the equations. With "single", bias_hh is a buffer of zeros, which stays in the state dict.
        batch_first: padded input and output are (B, L, ...) in place of (L, B, ...).
        bidirectional: add a direction that runs from each sequence's own last token to its first.
        reset_after: True for n = tanh(W x + b + r ∘ (U h + c)), as in torch and cuDNN; False for
            n = tanh(W x + b + U (r ∘ h)). Weights that were trained with one form do not fit the other.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: a size below 1, or another value of `bias`.

    Example:
        >>> import torch, fastqt
        >>> layer = fastqt.nn.GRU(16, 32, batch_first=True)
        >>> output, final = layer(torch.randn(2, 5, 16))
        >>> output.shape, final.shape
        (torch.Size([2, 5, 32]), torch.Size([1, 2, 32]))
        >>> torch.nn.GRU(16, 32).load_state_dict(layer.state_dict())
        <All keys matched successfully>

    Source: Cho et al. (arXiv:1406.1078), whose form is reset_after=False.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: Bias = True,
        batch_first: bool = False,
        bidirectional: bool = False,
        reset_after: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if bias not in (True, False, "single"):
            raise ValueError(f"bias: want True, False or 'single', got {shown(bias)}")

        super().__init__(
            "GRU",
            input_size,
            hidden_size,
            bias=bool(bias),
            batch_first=batch_first,
            bidirectional=bidirectional,
            device=device,
            dtype=dtype,
        )

        self.reset_after = reset_after
        self.single_bias = bias == "single"
        if self.single_bias:
            for name in [name for name in self._flat_weights_names if name.startswith("bias_hh")]:
                zeros = torch.zeros_like(getattr(self, name).data)
                delattr(self, name)
                self.register_buffer(name, zeros)
            self._init_flat_weights()

    def reset_parameters(self) -> None:
        """Draws the initial values of torch's GRU; biases that are no parameters are 0."""
        super().reset_parameters()
        for zeros in self.buffers():
            nn.init.zeros_(zeros)

    @overload
    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(self, input: PackedSequence, hx: Tensor | None = None) -> tuple[PackedSequence, Tensor]: ...

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Runs the GRU over a batch of sequences. D is 2 if the layer is bidirectional, otherwise 1.

        Args:
            input: (L, B, W), or (B, L, W) with `batch_first`, or (L, W) for one sequence, or a
                PackedSequence of (N, W).
            hx: initial states (D, B, H), or (D, H) for one sequence; None means zero.

        Returns:
            output: the states after every token, in the form of `input`, with D·H features. The forward
                direction comes first.
            h_n: the final state of each direction, (D, B, H) or (D, H).

        Raises:
            TypeError: not a tensor.
            ValueError: a wrong shape or dtype.
        """
        if isinstance(input, PackedSequence):
            _check_tensors(input.data, hx)
            data, batch_sizes, sorted_indices, unsorted_indices = input
            batch = self._check(data, hx, batch_sizes)
            if hx is not None and sorted_indices is not None:
                hx = hx.index_select(1, sorted_indices)
            output, h_n = self._run(data, batch_sizes, batch, hx)
            if unsorted_indices is not None:
                h_n = h_n.index_select(1, unsorted_indices)
            return PackedSequence(output, batch_sizes, sorted_indices, unsorted_indices), h_n

        _check_tensors(input, hx)
        if input.dim() == 2:
            batch_dim = 0 if self.batch_first else 1
            output, h_n = self.forward(input.unsqueeze(batch_dim), None if hx is None else hx.unsqueeze(1))
            return output.squeeze(batch_dim), h_n.squeeze(1)
        time_major = input.transpose(0, 1) if self.batch_first and input.dim() == 3 else input
        batch = self._check(time_major, hx)
        L = len(time_major)
        # torch's own takes no sequences, too, with a graph to all parameters.
        if not batch or _uses_torch(self.reset_after, input.device):
            output, h_n = self._run_torch(time_major, None, batch, hx)
        else:
            batch_sizes = torch.full((L,), batch, dtype=torch.int64, device="cpu")
            output, h_n = self._run(time_major.reshape(L * batch, -1), batch_sizes, batch, hx)
            output = output.view(L, batch, -1)
        return output.transpose(0, 1) if self.batch_first else output, h_n

    def final_states(self, input: PackedSequence) -> Tensor:
        """`forward(input)[1]` of a PackedSequence of (N, W), (D, B, H), without storing the output."""
        data, batch_sizes, _, unsorted_indices = input
        batch = self._check(data, None, batch_sizes)
        _, h_n = self._run(data, batch_sizes, batch, None, want_output=False)
        return h_n if unsorted_indices is None else h_n.index_select(1, unsorted_indices)

    def extra_repr(self) -> str:
        options = [super().extra_repr()]
        if self.single_bias:
            options.append("bias='single'")
        if not self.reset_after:
            options.append("reset_after=False")
        return ", ".join(options)

    def _run(
        self,
        data: Tensor,  # (N, W)
        batch_sizes: Tensor,  # (T,)
        batch: int,  # B
        hx: Tensor | None,  # (D, B, H)
        *,
        want_output: bool = True,
    ) -> tuple[Tensor, Tensor]:  # (N, D·H), (D, B, H)
        if _uses_torch(self.reset_after, data.device):
            return self._run_torch(data, batch_sizes, batch, hx)

        weight_dtype = self._weights(0)[0].dtype
        compute = torch.float32 if weight_dtype in (torch.bfloat16, torch.float16) else weight_dtype
        bfloat16 = weight_dtype is torch.bfloat16 or _autocasts_to_bfloat16(data)
        data = data.to(compute)
        outputs, finals = [], []

        for d in range(1 + self.bidirectional):
            w_ih, w_hh, *biases = (weight.to(compute) for weight in self._weights(d))
            b_ih, b_hh = biases or (None, None)
            output, final = gru_sequence(
                data,
                batch_sizes,
                batch,
                None if hx is None else hx[d].to(compute),
                w_ih,
                w_hh,
                b_ih,
                b_hh,
                reverse=d == 1,
                reset_after=self.reset_after,
                want_output=want_output,
                bfloat16=bfloat16,
            )
            outputs.append(output)
            finals.append(final)

        output = torch.cat(outputs, dim=1) if self.bidirectional else outputs[0]
        return output.to(weight_dtype), torch.stack(finals).to(weight_dtype)

    def _run_torch(
        self,
        data: Tensor,  # (N, W); (L, B, W) if batch_sizes is None
        batch_sizes: Tensor | None,  # (T,)
        batch: int,
        hx: Tensor | None,  # (D, B, H)
    ) -> tuple[Tensor, Tensor]:
        weights = [weight for d in range(1 + self.bidirectional) for weight in self._weights(d)]
        if hx is None:
            hx = weights[0].new_zeros(1 + self.bidirectional, batch, self.hidden_size)
        options = self.bias, 1, 0.0, self.training, self.bidirectional
        if batch_sizes is None:
            output, h_n = torch.gru(data, hx, weights, *options, False)
        else:
            output, h_n = torch.gru(data, batch_sizes, hx, weights, *options)
        return output, h_n

    def _weights(self, direction: int) -> list[Tensor]:
        """w_ih, w_hh and, if the layer has biases, b_ih and b_hh."""
        return [getattr(self, name) for name in self._all_weights[direction]]

    def _check(self, data: Tensor, hx: Tensor | None, batch_sizes: Tensor | None = None) -> int:
        """Checks a batch, (L, B, W), or (N, W) with batch_sizes, and returns B."""
        dim = 3 if batch_sizes is None else 2
        if data.dim() != dim or data.shape[-1] != self.input_size or len(data) == 0:
            raise ValueError(
                f"input: want (L, B, {self.input_size}), (B, L, {self.input_size}) with batch_first, "
                f"(L, {self.input_size}), or a PackedSequence of (N, {self.input_size}), with a length of at "
                f"least 1, got {tuple(data.shape)}"
            )
        weight_dtype = self._weights(0)[0].dtype
        if data.dtype != weight_dtype and not torch.is_autocast_enabled(data.device.type):
            raise ValueError(f"input: want the weights' dtype, {weight_dtype}, got {data.dtype}")
        batch = data.shape[1] if batch_sizes is None else int(batch_sizes[0])
        expected = (1 + self.bidirectional, batch, self.hidden_size)
        if hx is not None and tuple(hx.shape) != expected:
            raise ValueError(f"hx: want shape {expected}, got {tuple(hx.shape)}")
        return batch


def _check_tensors(input: object, hx: object) -> None:
    if not isinstance(input, Tensor):
        raise TypeError(f"input: want a tensor or a PackedSequence, got {type(input).__name__}")
    if not isinstance(hx, Tensor | None):
        raise TypeError(f"hx: want a tensor or None, got {type(hx).__name__}")


def _autocasts_to_bfloat16(data: Tensor) -> bool:
    kind = data.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.bfloat16


def _uses_torch(reset_after: bool, device: torch.device) -> bool:
    """Whether torch's own GRU computes the layer, which on a GPU is cuDNN's; torch.func can transform it."""
    if not is_transformed():
        return reset_after and device.type != "cpu"
    if not reset_after:
        raise RuntimeError("reset_after: want True under torch.func's transforms, got False")
    return True
