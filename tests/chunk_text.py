"""The text of a chunk that stands for what XLA's TPU compiler makes."""

# A chunk as XLA's TPU compiler writes it, cut short: a loop over batches around one over rounds,
# in which two layers run, and noise is drawn until there is enough. Weights are laid out anew at
# entry, the cache is copied in every round.
CHUNK = """HloModule jit_within, is_scheduled=true

%layer (p: (s32[], bf16[8,128], bf16[4096,1024])) -> (s32[], bf16[8,128], bf16[4096,1024]) {
  %p = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}, bf16[4096,1024]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %w = bf16[4096,1024]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=2
  %y = bf16[8,128]{1,0:T(8,128)(2,1)} fusion(%x, %w), kind=kLoop, calls=%product, metadata={op_name="jit(within)/while/body/while/body/layers/while/body/dot_general"}, backend_config={"window_config":{"estimated_cycles":"1000"}}
  %r = bf16[8,128]{1,0:T(8,128)(2,1)} all-reduce(%y), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%add
  ROOT %t = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}, bf16[4096,1024]{1,0:T(8,128)(2,1)}) tuple(%i, %r, %w)
}

%product (a: bf16[8,128], b: bf16[4096,1024]) -> bf16[8,128] {
  %a = bf16[8,128]{1,0} parameter(0)
  %b = bf16[4096,1024]{1,0} parameter(1)
  %view = bf16[4096,1024]{1,0} fusion(%b), kind=kLoop, calls=%viewed
  ROOT %c = bf16[8,128]{1,0} custom-call(%a, %view), custom_call_target="cut"
}

%viewed (v: bf16[4096,1024]) -> bf16[4096,1024] {
  %v = bf16[4096,1024]{1,0} parameter(0)
  ROOT %same = bf16[4096,1024]{1,0} bitcast(%v)
}

%add (l: bf16[], m: bf16[]) -> bf16[] {
  %l = bf16[] parameter(0)
  %m = bf16[] parameter(1)
  ROOT %s = bf16[] add(%l, %m)
}

%drawn (p: (s32[], s32[])) -> (s32[], s32[]) {
  %p = (s32[], s32[]) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %m = s32[] get-tuple-element(%p), index=1
  %k = s32[] add(%n, %m), metadata={op_name="jit(within)/while/body/while/body/noise/while/body/add"}, backend_config={"window_config":{"estimated_cycles":"40"}}
  ROOT %t = (s32[], s32[]) tuple(%k, %m)
}

%enough (p: (s32[], s32[])) -> pred[] {
  %p = (s32[], s32[]) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %m = s32[] get-tuple-element(%p), index=1
  ROOT %c = pred[] compare(%n, %m), direction=LT
}

%round (p: (s32[], bf16[8,128], bf16[4096,1024], bf16[2,64,128,128])) -> (s32[], bf16[8,128], bf16[4096,1024], bf16[2,64,128,128]) {
  %p = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}, bf16[4096,1024]{1,0:T(8,128)(2,1)}, bf16[2,64,128,128]{3,2,1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %w = bf16[4096,1024]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=2
  %kv = bf16[2,64,128,128]{3,2,1,0} get-tuple-element(%p), index=3
  %zero = s32[] constant(0)
  %given = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}, bf16[4096,1024]{1,0:T(8,128)(2,1)}) tuple(%zero, %x, %w)
  %l = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}, bf16[4096,1024]{1,0:T(8,128)(2,1)}) while(%given), condition=%enough, body=%layer, metadata={op_name="jit(within)/while/body/while/body/layers/while"}, backend_config={"known_trip_count":{"n":"2"}}
  %h = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%l), index=1
  %logits = f32[8,1024]{1,0:T(8,128)} fusion(%h, %w), kind=kOutput, calls=%product, metadata={op_name="jit(within)/while/body/while/body/lm_head/dot_general"}, backend_config={"window_config":{"estimated_cycles":"700"}}
  %n = (s32[], s32[]) tuple(%zero, %i)
  %noise = (s32[], s32[]) while(%n), condition=%enough, body=%drawn, metadata={op_name="jit(within)/while/body/while/body/noise/while"}
  %again = bf16[2,64,128,128]{2,3,1,0} copy(%kv), backend_config={"window_config":{"estimated_cycles":"5"}}
  %near = bf16[4096,1024]{1,0:T(8,128)(2,1)S(1)} copy-done(%early)
  %early = (bf16[4096,1024]{1,0:T(8,128)(2,1)S(1)}, bf16[4096,1024]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%w)
  ROOT %t = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}, bf16[4096,1024]{1,0:T(8,128)(2,1)}, bf16[2,64,128,128]{3,2,1,0}) tuple(%i, %h, %w, %again)
}

%running (p: (s32[], bf16[8,128], bf16[4096,1024], bf16[2,64,128,128])) -> pred[] {
  %p = (s32[], bf16[8,128], bf16[4096,1024], bf16[2,64,128,128]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %c = pred[] convert(%i)
}

%batch (p: (s32[], bf16[8,128], bf16[4096,1024], bf16[2,64,128,128])) -> (s32[], bf16[8,128], bf16[4096,1024], bf16[2,64,128,128]) {
  %p = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}, bf16[4096,1024]{1,0:T(8,128)(2,1)}, bf16[2,64,128,128]{3,2,1,0}) parameter(0)
  %begin = bf16[8,128]{1,0:T(8,128)(2,1)} fusion(%p), kind=kLoop, calls=%gathered, metadata={op_name="jit(within)/while/body/gather"}, backend_config={"window_config":{"estimated_cycles":"300"}}
  ROOT %rounds = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}, bf16[4096,1024]{1,0:T(8,128)(2,1)}, bf16[2,64,128,128]{3,2,1,0}) while(%p), condition=%running, body=%round
}

%gathered (g: bf16[8,128]) -> bf16[8,128] {
  ROOT %g = bf16[8,128]{1,0} parameter(0)
}

ENTRY %main (x: bf16[8,128], w: bf16[4096,1024], kv: bf16[2,64,128,128]) -> bf16[8,128] {
  %x = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="state.draft.slots.hidden"}
  %w = bf16[4096,1024]{0,1:T(8,128)(2,1)} parameter(1), metadata={op_name="params[\\'layers\\'][\\'q\\']"}
  %kv = bf16[2,64,128,128]{3,2,1,0} parameter(2), metadata={op_name="state.memory.pages[0].k"}
  %relaid = bf16[4096,1024]{1,0:T(8,128)(2,1)} copy(%w), metadata={op_name="jit(within)/while"}, backend_config={"window_config":{"estimated_cycles":"60"}}
  %one = s32[]{:T(128)} constant(1)
  %given = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}, bf16[4096,1024]{1,0:T(8,128)(2,1)}, bf16[2,64,128,128]{3,2,1,0}) tuple(%one, %x, %relaid, %kv)
  %batches = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}, bf16[4096,1024]{1,0:T(8,128)(2,1)}, bf16[2,64,128,128]{3,2,1,0}) while(%given), condition=%running, body=%batch
  ROOT %out = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%batches), index=1
}
"""  # noqa: E501 (as the compiler writes it)
