"""Compiled programs written by hand, in XLA's form."""

from __future__ import annotations


def config(cycles: int, more: str = "") -> str:
    """The part of an instruction that has the compiler's estimate."""
    return f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}{more}}}'


#: A loop of 3 rounds in a loop of 5, a fusion with a product, a kernel, a collective.
LOOPS = f"""HloModule jit_step, is_scheduled=true, entry_computation_layout={{()->f32[]}}

%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.0 = f32[] add(%a, %b)
}}

%product (p.0: bf16[64,32], p.1: bf16[32,16]) -> bf16[64,16] {{
  %p.0 = bf16[64,32]{{1,0:T(8,128)(2,1)}} parameter(0)
  %p.1 = bf16[32,16]{{1,0:T(8,128)(2,1)}} parameter(1)
  ROOT %conv = bf16[64,16]{{1,0:T(8,128)(2,1)}} convolution(%p.0, %p.1), dim_labels=bf_io->bf
}}

%inner_body (t.1: (s32[], bf16[64,32], bf16[32,16])) -> (s32[], bf16[64,32], bf16[32,16]) {{
  %t.1 = (s32[], bf16[64,32], bf16[32,16]) parameter(0)
  %i.1 = s32[] get-tuple-element(%t.1), index=0
  %x.1 = bf16[64,32]{{1,0:T(8,128)(2,1)}} get-tuple-element(%t.1), index=1
  %w.1 = bf16[32,16]{{1,0:T(8,128)(2,1)}} get-tuple-element(%t.1), index=2
  %matmul = bf16[64,16]{{1,0:T(8,128)(2,1)}} fusion(%x.1, %w.1), kind=kOutput, calls=%product, metadata={{op_name="jit(step)/while/body/linear/dot_general"}}, {config(1000)}
  ROOT %out.1 = (s32[], bf16[64,32], bf16[32,16]) tuple(%i.1, %x.1, %w.1)
}}

%inner_condition (t.2: (s32[], bf16[64,32], bf16[32,16])) -> pred[] {{
  %t.2 = (s32[], bf16[64,32], bf16[32,16]) parameter(0)
  %i.2 = s32[] get-tuple-element(%t.2), index=0
  %three = s32[]{{:T(128)}} constant(3)
  ROOT %less.2 = pred[] compare(%i.2, %three), direction=LT
}}

%outer_body (t.3: (s32[], bf16[64,32], bf16[32,16])) -> (s32[], bf16[64,32], bf16[32,16]) {{
  %t.3 = (s32[], bf16[64,32], bf16[32,16]) parameter(0)
  ROOT %inner = (s32[], bf16[64,32], bf16[32,16]) while(%t.3), condition=%inner_condition, body=%inner_body
}}

%outer_condition (t.4: (s32[], bf16[64,32], bf16[32,16])) -> pred[] {{
  %t.4 = (s32[], bf16[64,32], bf16[32,16]) parameter(0)
  ROOT %true = pred[] constant(true)
}}

ENTRY %main (x: bf16[64,32], w: bf16[32,16], g: f32[1024,1024]) -> f32[] {{
  %x = bf16[64,32]{{1,0:T(8,128)(2,1)}} parameter(0)
  %w = bf16[32,16]{{1,0:T(8,128)(2,1)}} parameter(1)
  %g = f32[1024,1024]{{1,0:T(8,128)}} parameter(2)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[64,32], bf16[32,16]) tuple(%zero, %x, %w)
  %outer = (s32[], bf16[64,32], bf16[32,16]) while(%start), condition=%outer_condition, body=%outer_body, backend_config={{"known_trip_count":{{"n":"5"}}}}
  %kernel.1 = (bf16[64,32]{{1,0:T(8,128)(2,1)}}, f32[64,128]{{1,0:T(8,128)}}) custom-call(%x, /*index=1*/%x), custom_call_target="tpu_custom_call", frontend_attributes={{kernel_metadata={{
 "xprof_metadata":"{{\\"block_q\\": 128}}"
}}}}, metadata={{op_name="jit(step)/scaled_dot_product_attention/pallas_call"}}, backend_config={{"custom_call_config":{{"body":"AAAA"}}}}
  %all-reduce.1 = f32[1024,1024]{{1,0:T(8,128)}} all-reduce(%g), channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true, to_apply=%sum
  ROOT %copy = f32[1024,1024]{{0,1:T(8,128)}} copy(%all-reduce.1), {config(7000)}
}}
"""  # noqa: E501  (the form is XLA's)

#: Transfers that are started, and waited for after some work.
OVERLAP = f"""HloModule jit_overlap, is_scheduled=true

ENTRY %main (g: f32[1024,1024]) -> f32[1024,1024] {{
  %g = f32[1024,1024]{{1,0:T(8,128)}} parameter(0)
  %send = (f32[1024,1024]{{1,0:T(8,128)}}, f32[1024,1024]{{1,0:T(8,128)}}, u32[]{{:S(2)}}, u32[]{{:S(2)}}) collective-permute-start(%g), channel_id=1, source_target_pairs={{{{0,1}},{{1,0}}}}
  %fetch = (f32[1024,1024]{{1,0:T(8,128)S(1)}}, f32[1024,1024]{{1,0:T(8,128)}}, u32[]{{:S(2)}}) copy-start(%g)
  %work = f32[1024,1024]{{0,1:T(8,128)}} copy(%g), {config(17500)}
  %fetched = f32[1024,1024]{{1,0:T(8,128)S(1)}} copy-done(%fetch)
  ROOT %sent = f32[1024,1024]{{1,0:T(8,128)}} collective-permute-done(%send)
}}
"""  # noqa: E501

_MEETING = 'is_host_transfer=true, frontend_attributes={{_xla_host_transfer_rendezvous="{}",_xla_megascale_target="{{1,2}}x{{0:7}}",_xla_megascale_transfer_type="ALL_GATHER"}}'  # noqa: E501

#: 4 MiB of each device to the other slice, and 4 MiB from there, beside some work.
BETWEEN_SLICES = f"""HloModule jit_between, is_scheduled=true

ENTRY %main (g: f32[1024,1024]) -> f32[2048,1024] {{
  %g = f32[1024,1024]{{1,0:T(8,128)}} parameter(0)
  %token = token[] after-all()
  %recv = (f32[2048,1024]{{1,0:T(8,128)}}, u32[], token[]) recv(%token), channel_id=1, {_MEETING.format("gather_0")}
  %send = (f32[1024,1024]{{1,0:T(8,128)}}, u32[], token[]) send(%g, %token), channel_id=2, {_MEETING.format("gather_0")}
  %work = f32[1024,1024]{{0,1:T(8,128)}} copy(%g), {config(175000)}
  %recv-done = (f32[2048,1024]{{1,0:T(8,128)}}, token[]) recv-done(%recv), channel_id=1
  %send-done = token[] send-done(%send), channel_id=2
  ROOT %got = f32[2048,1024]{{1,0:T(8,128)}} get-tuple-element(%recv-done), index=0
}}
"""  # noqa: E501  (the form is XLA's)

#: A slice of an array in the host's memory, started before some work.
FROM_HOST = f"""HloModule jit_from_host, is_scheduled=true

ENTRY %main (w: bf16[4,1024,1024], g: f32[1024,1024]) -> bf16[1,1024,1024] {{
  %w = bf16[4,1024,1024]{{2,1,0:T(8,128)(2,1)S(5)}} parameter(0)
  %g = f32[1024,1024]{{1,0:T(8,128)}} parameter(1)
  %one = s32[]{{:T(128)}} constant(1)
  %dynamic-slice-start = ((bf16[4,1024,1024]{{2,1,0:T(8,128)(2,1)S(5)}}, s32[]{{:T(128)}}, s32[]{{:T(128)}}, s32[]{{:T(128)}}), bf16[1,1024,1024]{{2,1,0:T(8,128)(2,1)}}, u32[]{{:S(2)}}) dynamic-slice-start(%w, %one, %one, %one), dynamic_slice_sizes={{1,1024,1024}}
  %work = f32[1024,1024]{{0,1:T(8,128)}} copy(%g), {config(70000)}
  ROOT %dynamic-slice-done = bf16[1,1024,1024]{{2,1,0:T(8,128)(2,1)}} dynamic-slice-done(%dynamic-slice-start)
}}
"""  # noqa: E501  (the form is XLA's)
