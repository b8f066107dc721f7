"""The configuration for Triton: read by protobuf's own parser, against the fields of Triton's model_config.proto that it may use."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from _export_models import FORMS, made
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from carrywave.errors import UserError
from carrywave.exporting import triton
from carrywave.exporting.portable import Portable

# Names, numbers and types as in model_config.proto of github.com/triton-inference-server/common: the messages on the way to our fields.
ENUMS = {
    "DataType": {"TYPE_INVALID": 0, "TYPE_BOOL": 1, "TYPE_INT32": 8, "TYPE_INT64": 9, "TYPE_FP32": 11, "TYPE_FP64": 12},
    "Kind": {"CONTROL_SEQUENCE_START": 0, "CONTROL_SEQUENCE_READY": 1, "CONTROL_SEQUENCE_END": 2, "CONTROL_SEQUENCE_CORRID": 3},
}
MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "ModelTensorReshape": {"shape": (1, "int64*")},
    "ModelInput": {
        "name": (1, "string"),
        "data_type": (2, "DataType"),
        "dims": (4, "int64*"),
        "reshape": (5, "ModelTensorReshape"),
        "allow_ragged_batch": (7, "bool"),
        "optional": (8, "bool"),
    },
    "ModelOutput": {
        "name": (1, "string"),
        "data_type": (2, "DataType"),
        "dims": (3, "int64*"),
        "reshape": (5, "ModelTensorReshape"),
    },
    "Control": {"kind": (1, "Kind"), "int32_false_true": (2, "int32*"), "fp32_false_true": (3, "float*"), "bool_false_true": (5, "bool*")},
    "ControlInput": {"name": (1, "string"), "control": (2, "Control*")},
    "State": {"input_name": (1, "string"), "output_name": (2, "string"), "data_type": (3, "DataType"), "dims": (4, "int64*")},
    "StrategyDirect": {"max_queue_delay_microseconds": (1, "uint64")},
    "StrategyOldest": {"max_candidate_sequences": (1, "int32"), "max_queue_delay_microseconds": (3, "uint64")},
    "ModelSequenceBatching": {
        "max_sequence_idle_microseconds": (1, "uint64"),
        "control_input": (2, "ControlInput*"),
        "direct": (3, "StrategyDirect"),
        "oldest": (4, "StrategyOldest"),
        "state": (5, "State*"),
    },
    "ModelConfig": {
        "name": (1, "string"),
        "platform": (2, "string"),
        "backend": (17, "string"),
        "max_batch_size": (4, "int32"),
        "input": (5, "ModelInput*"),
        "output": (6, "ModelOutput*"),
        "sequence_batching": (13, "ModelSequenceBatching"),
    },
}


def schema() -> Any:
    """The class of a ModelConfig."""
    file = descriptor_pb2.FileDescriptorProto(name="model_config.proto", package="inference", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for value, number in values.items():
            enum.value.add(name=value, number=number)
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for own, (number, kind) in fields.items():
            label = field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
            plain = kind.rstrip("*")
            if plain in ENUMS or plain in MESSAGES:
                what = field.TYPE_ENUM if plain in ENUMS else field.TYPE_MESSAGE
                message.field.add(name=own, number=number, label=label, type=what, type_name=f".inference.{plain}")
            else:
                message.field.add(name=own, number=number, label=label, type=getattr(field, f"TYPE_{plain.upper()}"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))


@pytest.mark.parametrize("name", [name for name, stateful in FORMS if stateful])
def test_triton_sends_everything_that_the_model_takes(name: str) -> None:
    portable = Portable(made(name), stateful=True)
    config = text_format.Parse(triton.config(portable, "a-model_1.2"), schema()())
    batching = config.sequence_batching
    taken = [
        *(each.name for each in config.input),
        *(each.name for each in batching.control_input),
        *(s.input_name for s in batching.state),
    ]
    assert sorted(taken) == sorted(port.name for port in portable.inputs)
    given = [config.output[0].name, *(state.output_name for state in batching.state)]
    assert given == [port.name for port in portable.outputs]
    # A dimension of lanes goes before all of these; the shapes of the ports are what the model has then.
    shapes = {port.name: [-1 if isinstance(size, str) else size for size in port.shape] for port in (*portable.inputs, *portable.outputs)}
    for each in (*config.input, *config.output):
        dims = each.reshape.shape if each.HasField("reshape") else each.dims
        assert [-1, *dims] == shapes[each.name], each.name
    for state in batching.state:
        assert [-1, *state.dims] == shapes[state.input_name], state.input_name
    kinds = {each.name: each.control[0].kind for each in batching.control_input}
    assert kinds == {"fresh": ENUMS["Kind"]["CONTROL_SEQUENCE_START"], "ready": ENUMS["Kind"]["CONTROL_SEQUENCE_READY"]}
    assert all(list(each.control[0].bool_false_true) == [False, True] for each in batching.control_input)
    assert config.max_batch_size >= batching.oldest.max_candidate_sequences > 0
    assert config.backend == "onnxruntime"


def test_a_parser_that_knows_the_fields_refuses_others() -> None:
    with pytest.raises(text_format.ParseError, match="initial"):
        text_format.Parse("sequence_batching { initial: 1 }", schema()())


def test_a_name_that_triton_cannot_use_is_refused() -> None:
    with pytest.raises(UserError, match=r"'a model' cannot be the name of a Triton model; .* \(output=\.\.\.\)"):
        triton.config(Portable(made("language"), stateful=True), "a model")
