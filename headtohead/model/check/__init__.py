"""The conformance suite: the requirements on a mechanism to be raced, decoded and accounted for.

raceable    causal, deterministic, independent of batch neighbors and padding, correct gradients, finite; in a whole
            decoder independent of padding in both directions, and close to float32 under autocast to bf16
decodable   cached decoding equals the full forward; declared cache bytes equal the allocated ones
accounted   declared FLOPs equal the counted ones, circuits complete, fast path equals plain reference, compiles
"""

from headtohead.model.check.suite import LEVELS, Finding, Verification, check_composed

__all__ = ["LEVELS", "Finding", "Verification", "check_composed"]
