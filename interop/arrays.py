"""One tensor as a JAX array, and one array as a tensor: always a copy, since only one of the two may change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from scoped_fn.interop.dtypes import WIDE, as_numpy, as_tensor, name_of

if TYPE_CHECKING:
    import numpy as np


def tensor_to_array(tensor: torch.Tensor) -> Any:
    """Returns a tensor's values as a JAX array on JAX's default device."""
    import jax

    # Contiguous and private, so JAX may keep the memory: device_put does, where its device is the CPU.
    host = as_numpy(plain(tensor).clone(memory_format=torch.contiguous_format))
    return jax.device_put(narrowed(host))


def array_to_tensor(array: Any) -> torch.Tensor:
    """Returns an array's values as a tensor on the CPU; a typed random key as its uint32 words."""
    import jax
    import numpy as np

    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"Expected an array with values, got {array} inside a JAX transform. "
            "Wrap the torch function with interop.to_jax, and call that."
        )
    host = unmasked(array) if isinstance(array, np.ndarray) else key_words(_on_one_device(array))
    return as_tensor(np.array(host, order="C"))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor detached, with its negative and conjugate bits carried out.

    Raises:
        TypeError: It is no plain strided tensor in the memory of the CPU.
    """
    kind = _strange_kind(tensor)
    if kind:
        raise TypeError(f"Expected a strided torch.Tensor on the CPU, got {kind[0]}. {kind[1]}")
    name_of(tensor.dtype)
    try:
        made = tensor.detach().resolve_conj().resolve_neg()
        made.data_ptr()  # what a transform of torch.func wraps has none
    except RuntimeError as error:
        raise TypeError(
            "Expected a tensor with values, got one inside a torch.func transform. "
            "Wrap the JAX function with interop.from_jax, and call that."
        ) from error
    return made


def _strange_kind(tensor: torch.Tensor) -> tuple[str, str] | None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__name__}", "Pass its data as a plain tensor; in code that is traced use from_jax."
    if tensor.layout != torch.strided:
        return f"layout {tensor.layout}", "Call .to_dense() first."
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype})", "Call .dequantize() first."
    if tensor.device.type == "meta":
        return "a tensor on the meta device, which has no values", "Give it values, for example by torch.empty_like."
    return (f"one on {tensor.device}", "Call .cpu() first.") if tensor.device.type != "cpu" else None


def x64_enabled() -> bool:
    """Returns whether JAX keeps 64 bits here."""
    import jax

    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


def unmasked(host: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns an array that hides nothing; raises `TypeError` for a masked one."""
    import numpy as np

    if isinstance(host, np.ma.MaskedArray):
        raise TypeError("Expected an array without a mask, got a masked one. Call .filled(value) first.")
    return host


def narrowed(host: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns an array that JAX keeps as it is: with x64 off, 64-bit integers that fit as 32-bit ones.

    Raises:
        TypeError: x64 is off, and floats or complex numbers have 64 bits a part.
        OverflowError: x64 is off, and an integer does not fit.
    """
    import numpy as np

    name = str(host.dtype)
    if name not in WIDE or x64_enabled():
        return host
    target = np.dtype(narrow_name(name))
    if host.size and (host.min() < np.iinfo(target).min or host.max() > np.iinfo(target).max):
        raise OverflowError(
            f"Expected {name} values that fit {target} while jax_enable_x64 is off, got "
            f"{host.min()} to {host.max()}. Set jax_enable_x64, or convert them."
        )
    return host.astype(target)


def narrow_name(name: str) -> str:
    """Returns what JAX makes of a dtype here: with x64 off, 32-bit integers of 64-bit ones.

    Raises:
        TypeError: x64 is off, and floats or complex numbers have 64 bits a part.
    """
    if name not in WIDE or x64_enabled():
        return name
    if "int" not in name:
        raise TypeError(
            f"Expected no {name} while jax_enable_x64 is off, got one. "
            "Set jax_enable_x64, or convert it first: JAX would drop half of its bits."
        )
    return name.replace("64", "32")


def _on_one_device(array: Any) -> Any:
    if array.is_deleted():
        raise ValueError("Expected an array with values, got one that was deleted or donated. Pass the one it became.")
    if len(array.sharding.device_set) != 1:
        raise ValueError(
            f"Expected an array on one device, got one spread over {len(array.sharding.device_set)}. "
            "Gather it first: jax.device_put(array, jax.devices()[0])."
        )
    return array


def key_words(array: Any) -> Any:
    """Returns a typed random key's words; any other array as it is.

    Raises:
        TypeError: The key is of another implementation than threefry, so torch would draw other numbers from it.
    """
    import jax
    import jax.numpy as jnp

    if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return array
    if "threefry" not in str(jax.random.key_impl(array)):
        raise TypeError(
            f"Expected a threefry key, got one of {jax.random.key_impl(array)}. "
            'Make it with jax.random.key(seed, impl="threefry2x32").'
        )
    return jax.random.key_data(array)
