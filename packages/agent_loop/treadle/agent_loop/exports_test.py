"""The public names, and what importing them costs."""

import subprocess
import sys

import treadle.agent_loop
from treadle.agent_loop import parsers, rpc, testing

HEAVY = ("torch", "ray", "numpy", "transformers", "tokenizers", "pydantic", "jinja2", "yaml")


def test_public_names_are_pinned() -> None:
    assert treadle.agent_loop.__all__ == PUBLIC
    assert rpc.__all__ == [
        "ChannelSecurity",
        "GrpcTokenGenerator",
        "Requirements",
        "RetryPolicy",
        "RpcDeadlines",
        "ServerInfo",
        "connect",
    ]
    assert parsers.__all__ == [
        "PARSER_ALIASES",
        "PARSER_NAMES",
        "HermesParser",
        "ParsedText",
        "ToolCallParser",
        "UnclosedReasoning",
        "parser_for_template",
        "parser_named",
    ]
    assert testing.__all__ == [
        "ByteRenderer",
        "EchoGenerator",
        "FakeClock",
        "Request",
        "ScriptedGenerator",
        "ScriptedInteraction",
        "ScriptedTool",
        "reply",
    ]
    for module in (treadle.agent_loop, rpc, parsers, testing):
        assert all(hasattr(module, name) for name in module.__all__)


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(run.stdout.split())


def test_the_package_needs_the_standard_library_only() -> None:
    loaded = modules_after("import treadle.agent_loop, treadle.agent_loop.testing")
    assert not loaded & {*HEAVY, "grpc", "google.protobuf"}


def test_the_client_needs_grpc_and_protobuf_only() -> None:
    loaded = modules_after("import treadle.agent_loop.rpc")
    assert {"grpc", "google.protobuf"} <= loaded
    assert not loaded & set(HEAVY)


PUBLIC = [
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
