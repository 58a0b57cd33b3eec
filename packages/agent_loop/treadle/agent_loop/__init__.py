"""Agent loops for reinforcement learning: tokens in, frozen trajectories out.

Needs the standard library only. The gRPC client is `treadle.agent_loop.rpc`, the renderer for
Hugging Face tokenizers `treadle.agent_loop.hf`, the fakes `treadle.agent_loop.testing`.
"""

from treadle.agent_loop.errors import (
    AgentLoopError,
    ContractError,
    EngineFailedError,
    GenerationError,
    GenerationTimeoutError,
    LoopError,
    OverloadedError,
    PromptTooLongError,
    RenderError,
    ReplicaUnavailableError,
    RequestRejectedError,
    RewardError,
    RolloutError,
    SetupError,
    ToolError,
    TrajectoryTimeoutError,
    UnknownLoopError,
    WeightVersionBehindError,
    boundary,
)
from treadle.agent_loop.generator import RequestContext, TokenGenerator
from treadle.agent_loop.limits import LoopLimits, TruncateSide
from treadle.agent_loop.loop import AgentLoop, RewardFn, Services
from treadle.agent_loop.renderer import ChatRenderer, MalformedCall, ParsedCompletion
from treadle.agent_loop.tool import Tool, ToolFailure, ToolResult, ToolSession
from treadle.agent_loop.trajectory import Trajectory
from treadle.agent_loop.transcript import Origin, Span, Tokens, Transcript
from treadle.agent_loop.types import (
    AgentTask,
    Completion,
    FinishReason,
    Message,
    Role,
    SamplingParams,
    StopReason,
    TokenChunk,
    ToolCall,
    ToolSpec,
)

__all__ = [
    "AgentLoop",
    "AgentLoopError",
    "AgentTask",
    "ChatRenderer",
    "Completion",
    "ContractError",
    "EngineFailedError",
    "FinishReason",
    "GenerationError",
    "GenerationTimeoutError",
    "LoopError",
    "LoopLimits",
    "MalformedCall",
    "Message",
    "Origin",
    "OverloadedError",
    "ParsedCompletion",
    "PromptTooLongError",
    "RenderError",
    "ReplicaUnavailableError",
    "RequestContext",
    "RequestRejectedError",
    "RewardError",
    "RewardFn",
    "Role",
    "RolloutError",
    "SamplingParams",
    "Services",
    "SetupError",
    "Span",
    "StopReason",
    "TokenChunk",
    "TokenGenerator",
    "Tokens",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolFailure",
    "ToolResult",
    "ToolSession",
    "ToolSpec",
    "Trajectory",
    "TrajectoryTimeoutError",
    "Transcript",
    "TruncateSide",
    "UnknownLoopError",
    "WeightVersionBehindError",
    "boundary",
]
