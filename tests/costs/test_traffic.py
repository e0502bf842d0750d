"""What the kernels between products read and write, counted in XLA's text."""

from mpmd.costs.hlo_text import sizes_of
from mpmd.costs.traffic import traffic_of

MATRIX, ROW = 64 * 128 * 4, 128 * 4
TEXT = """HloModule jit_step, is_scheduled=true

%max (a: f32[], b: f32[]) -> f32[] {
  ROOT %maximum = f32[] maximum(%a, %b)
}

%row_maximum (param_0: f32[64,128]) -> f32[64] {
  %param_0 = f32[64,128]{1,0} parameter(0)
  %low = f32[] constant(-inf)
  ROOT %reduce.1 = f32[64]{0} reduce(%param_0, %low), dimensions={1}, to_apply=%max
}

%weights (param_0: f32[64,128], param_1: f32[64]) -> bf16[64,128] {
  %param_0 = f32[64,128]{1,0} parameter(0)
  %param_1 = f32[64]{0} parameter(1)
  %wide = f32[64,128]{1,0} broadcast(%param_1), dimensions={0}
  %less = f32[64,128]{1,0} subtract(%param_0, %wide)
  %more = f32[64,128]{1,0} multiply(%less, %param_0)
  ROOT %narrow = bf16[64,128]{1,0} convert(%more)
}

%one_row (param_0: f32[64,128], param_1: s32[]) -> f32[1,128] {
  %param_0 = f32[64,128]{1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,128]{1,0} dynamic-slice(%param_0, %param_1, %zero), dynamic_slice_sizes={1,128}
}

%row_written (param_0: f32[64,128], param_1: f32[1,128], param_2: s32[]) -> f32[64,128] {
  %param_0 = f32[64,128]{1,0} parameter(0)
  %param_1 = f32[1,128]{1,0} parameter(1)
  %param_2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %written = f32[64,128]{1,0} dynamic-update-slice(%param_0, %param_1, %param_2, %zero)
}

%product (param_0: bf16[64,128], param_1: bf16[64,128]) -> f32[64,64] {
  %param_0 = bf16[64,128]{1,0} parameter(0)
  %param_1 = bf16[64,128]{1,0} parameter(1)
  ROOT %dot.1 = f32[64,64]{1,0} dot(%param_0, %param_1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%body (state: (s32[], f32[64,128])) -> (s32[], f32[64,128]) {
  %state = (s32[], f32[64,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[64,128]{1,0} get-tuple-element(%state), index=1
  %row = f32[1,128]{1,0} fusion(%x, %i), kind=kLoop, calls=%one_row
  %changed = f32[64,128]{1,0} fusion(%x, %row, %i), kind=kLoop, calls=%row_written
  ROOT %next = (s32[], f32[64,128]{1,0}) tuple(%i, %changed)
}

ENTRY %main (x: f32[64,128]) -> f32[64,64] {
  %x = f32[64,128]{1,0} parameter(0)
  %highest = f32[64]{0} fusion(%x), kind=kInput, calls=%row_maximum
  %softened = bf16[64,128]{1,0} fusion(%x, %highest), kind=kLoop, calls=%weights
  %scores = f32[64,64]{1,0} fusion(%softened, %softened), kind=kCustom, calls=%product
  %begin = (s32[], f32[64,128]{1,0}) tuple(%zero, %x)
  %loop = (s32[], f32[64,128]{1,0}) while(%begin), body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %start = f32[64,64]{1,0} all-reduce-start(%scores), replica_groups={{0,1}}, to_apply=%max
  ROOT %done = f32[64,64]{1,0} all-reduce-done(%start)
}
"""


def test_each_kernel_reads_its_operands_once_and_writes_its_results_and_products_are_left_out():
    maximum = MATRIX + 64 * 4
    weights = MATRIX + 64 * 4 + MATRIX // 2
    loop = 3 * ((ROW + 4 + ROW) + (ROW + 4 + ROW))  # a row is cut out, and one is written in place
    assert traffic_of(TEXT) == maximum + weights + loop


def test_a_copy_and_a_transpose_are_kernels_of_their_own():
    text = TEXT.replace("  ROOT %done", "  %turned = f32[128,64]{1,0} transpose(%x), dimensions={1,0}\n  ROOT %done")
    assert traffic_of(text) == traffic_of(TEXT) + 2 * MATRIX


def test_a_program_that_runs_as_several_has_the_traffic_of_all():
    assert traffic_of(TEXT + TEXT) == 2 * traffic_of(TEXT)


def test_tokens_take_no_memory():
    assert sizes_of("(token[], pred[3], f8e4m3fn[4], opaque[])") == [0, 3, 4, 0]
