"""jaxdist: LLM training and serving as one JAX SPMD program over a (dp, pp, tp) mesh.

Importing the package is light: JAX is loaded by the verb that needs it.
"""

__version__ = "0.1.0.dev0"
