"""The conformance suite: what a mechanism must hold to be raced, decoded and accounted for.

raceable    causal, deterministic, blind to its batch neighbors and to padding, right gradients, finite; in a whole
            decoder blind to padding in both directions, and close to float32 under autocast to bf16
decodable   cached decoding equals the full forward; declared cache bytes are the allocated ones
accounted   declared FLOPs are the counted ones, circuits complete, fast path equals plain path, compiles
"""

from headtohead.model.check.suite import LEVELS, Finding, Verification, check_composed

__all__ = ["LEVELS", "Finding", "Verification", "check_composed"]
