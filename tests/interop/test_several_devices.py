"""An array that is spread over devices, in a process of its own: JAX counts its devices once."""

import os
import subprocess
import sys

CODE = """
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from scoped_fn.interop import jax_to_torch
mesh = Mesh(jax.devices(), ("x",))
try:
    jax_to_torch(jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("x"))))
except ValueError as error:
    print(error)
print(jax_to_torch(jax.device_put(jnp.arange(2.0), jax.devices()[1])))
"""


def test_a_sharded_array_is_refused() -> None:
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    ran = subprocess.run(
        [sys.executable, "-c", CODE], env={**os.environ, **flags}, capture_output=True, text=True, timeout=120
    )
    assert "Expected an array on one device, got one spread over 2. Gather it first" in ran.stdout, ran.stderr
    assert "tensor([0., 1.])" in ran.stdout
