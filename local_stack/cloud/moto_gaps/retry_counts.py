"""Gap: a state's retry attempts and back-off are counted over the whole execution, so that a polling state that failed
a few times long ago has no retries left. On Step Functions they start anew at every entry of the state."""

from __future__ import annotations

from typing import Any

from moto.stepfunctions.parser.asl.component.state.exec.execute_state import ExecutionState


def install() -> None:
    """Forget a state's retries when it is entered."""
    evaluate = ExecutionState._eval_state

    def evaluate_with_fresh_retries(self: Any, env: Any) -> None:
        for retrier in self.retry.retriers if self.retry else ():
            env.heap.pop(retrier.max_attempts._attempt_number_key(), None)
            env.heap.pop(retrier.backoff_rate._next_multiplier_key(), None)
        evaluate(self, env)

    ExecutionState._eval_state = evaluate_with_fresh_retries
