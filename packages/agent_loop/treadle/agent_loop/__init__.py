"""Agent loops for reinforcement learning: tokens in, frozen trajectories out.

This module needs the standard library only. The gRPC client is `treadle.agent_loop.rpc`, the
renderer for Hugging Face tokenizers `treadle.agent_loop.hf`, and the fakes for tests
`treadle.agent_loop.testing`.
"""

from treadle.agent_loop.capture import (
    CapturedSession,
    CapturedTurn,
    Continuation,
    LimitReachedError,
    SessionEndedError,
)
from treadle.agent_loop.errors import (
    AgentLoopError,
    ContractError,
    EngineFailedError,
    GenerationError,
    GenerationTimeoutError,
    ImageRejectedError,
    InteractionError,
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
from treadle.agent_loop.import_path import cannot_load, load_import_path
from treadle.agent_loop.loops.conversation import Conversation, Turn
from treadle.agent_loop.loops.limits import LoopLimits
from treadle.agent_loop.loops.loop import AgentLoop, RewardFn, Services, scores_itself
from treadle.agent_loop.loops.registry import (
    LOOP_ENTRY_POINTS,
    SINGLE_TURN_AGENT,
    TOOL_AGENT,
    LoopRegistry,
    default_loops,
)
from treadle.agent_loop.loops.single_turn import SingleTurnLoop
from treadle.agent_loop.loops.tool_loop import OnMalformedCall, ToolAgentLoop
from treadle.agent_loop.parsers import HermesParser, ParsedText, ToolCallParser
from treadle.agent_loop.routing.placement import (
    HashedSession,
    LeastLoaded,
    ReplicaLoad,
    Router,
    StickySession,
)
from treadle.agent_loop.routing.session_table import NoReplica
from treadle.agent_loop.runner.failure_policy import Drop, FailFast, FailurePolicy, Retry, Verdict
from treadle.agent_loop.runner.runner import RolloutRunner, RunReport
from treadle.agent_loop.runner.seeds import derive_seed
from treadle.agent_loop.runner.watchdog import Pulse, Watchdog
from treadle.agent_loop.tokens.arrays import BoolArray, FloatArray, IntArray
from treadle.agent_loop.tokens.renderer import (
    ChatRenderer,
    FinishingRenderer,
    MalformedCall,
    ParsedCompletion,
    PlacedImage,
    Rendering,
)
from treadle.agent_loop.tokens.transcript import Origin, Span, SpanTable, Tokens, Transcript
from treadle.agent_loop.tools.class_tools import MethodTool, class_tools
from treadle.agent_loop.tools.function_tool import FunctionTool, ToolFunction, function_tool
from treadle.agent_loop.tools.interaction import (
    Interaction,
    InteractionReply,
    InteractionSession,
    UserSimulator,
    selected_interaction,
)
from treadle.agent_loop.tools.metric_rules import ReportsMetrics, check_metric_rules
from treadle.agent_loop.tools.text_truncation import TextCodec, TruncateSide
from treadle.agent_loop.tools.tool import ChecksTask, Tool, ToolFailure, ToolResult, ToolSession
from treadle.agent_loop.tools.toolbox import Toolbox, selected_tools
from treadle.agent_loop.trajectory import (
    Exchange,
    Finding,
    MessageSource,
    SampleReward,
    Score,
    Trajectory,
)
from treadle.agent_loop.types import (
    IMAGE_MARK,
    AgentTask,
    Completion,
    FinishReason,
    Image,
    JsonConstraint,
    Message,
    Role,
    RoutedExperts,
    SamplingParams,
    StopReason,
    Tag,
    TagConstraint,
    TokenChunk,
    ToolCall,
    ToolSpec,
)
from treadle.agent_loop.user_code import user_frame, user_place

__all__ = [
    "IMAGE_MARK",
    "LOOP_ENTRY_POINTS",
    "SINGLE_TURN_AGENT",
    "TOOL_AGENT",
    "AgentLoop",
    "AgentLoopError",
    "AgentTask",
    "BoolArray",
    "CapturedSession",
    "CapturedTurn",
    "ChatRenderer",
    "ChecksTask",
    "Completion",
    "Continuation",
    "ContractError",
    "Conversation",
    "Drop",
    "EngineFailedError",
    "Exchange",
    "FailFast",
    "FailurePolicy",
    "Finding",
    "FinishReason",
    "FinishingRenderer",
    "FloatArray",
    "FunctionTool",
    "GenerationError",
    "GenerationTimeoutError",
    "HashedSession",
    "HermesParser",
    "Image",
    "ImageRejectedError",
    "IntArray",
    "Interaction",
    "InteractionError",
    "InteractionReply",
    "InteractionSession",
    "JsonConstraint",
    "LeastLoaded",
    "LimitReachedError",
    "LoopError",
    "LoopLimits",
    "LoopRegistry",
    "MalformedCall",
    "Message",
    "MessageSource",
    "MethodTool",
    "NoReplica",
    "OnMalformedCall",
    "Origin",
    "OverloadedError",
    "ParsedCompletion",
    "ParsedText",
    "PlacedImage",
    "PromptTooLongError",
    "Pulse",
    "RenderError",
    "Rendering",
    "ReplicaLoad",
    "ReplicaUnavailableError",
    "ReportsMetrics",
    "RequestContext",
    "RequestRejectedError",
    "Retry",
    "RewardError",
    "RewardFn",
    "Role",
    "RolloutError",
    "RolloutRunner",
    "RoutedExperts",
    "Router",
    "RunReport",
    "SampleReward",
    "SamplingParams",
    "Score",
    "Services",
    "SessionEndedError",
    "SetupError",
    "SingleTurnLoop",
    "Span",
    "SpanTable",
    "StickySession",
    "StopReason",
    "Tag",
    "TagConstraint",
    "TextCodec",
    "TokenChunk",
    "TokenGenerator",
    "Tokens",
    "Tool",
    "ToolAgentLoop",
    "ToolCall",
    "ToolCallParser",
    "ToolError",
    "ToolFailure",
    "ToolFunction",
    "ToolResult",
    "ToolSession",
    "ToolSpec",
    "Toolbox",
    "Trajectory",
    "TrajectoryTimeoutError",
    "Transcript",
    "TruncateSide",
    "Turn",
    "UnknownLoopError",
    "UserSimulator",
    "Verdict",
    "Watchdog",
    "WeightVersionBehindError",
    "boundary",
    "cannot_load",
    "check_metric_rules",
    "class_tools",
    "default_loops",
    "derive_seed",
    "function_tool",
    "load_import_path",
    "scores_itself",
    "selected_interaction",
    "selected_tools",
    "user_frame",
    "user_place",
]
