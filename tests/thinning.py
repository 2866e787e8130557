"""Grids of which the default run takes a part: every so many-th case; the others are marked `slow`.

One table, so that the time of the default run is set in one place. `-m "slow or not slow"` runs every case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

# By file and function: of how many cases one runs by default, the first of them.
GRIDS = {
    "core/test_kill.py::test_killed_at_some_moments": 3,
    "core/test_native_limits.py::test_memory_follows_from_the_tensors_and_is_given_back": 3,
    "exporter/checks/test_half_precision.py::test_the_shipped_demo_passes_and_shows_both_errors": 2,
    "exporter/checks/test_long_checks.py::test_the_reference_at_some_positions_equals_the_whole": 3,
    "exporter/checks/test_long_checks.py::test_two_runs_find_a_lost_window": 3,
    "exporter/lowering/grouped/test_grouped_function.py::test_function_and_operator_equal_the_reference": 6,
    "exporter/lowering/grouped/test_grouped_function.py::test_one_session_at_many_sizes": 3,
    "exporter/lowering/grouped/test_grouped_step_function.py::test_calls_one_after_another_are_the_whole_sequence": 3,
    "exporter/lowering/test_attention_function.py::test_body_equals_reference": 8,
    "exporter/lowering/test_attention_function.py::test_body_in_every_opset_layout_and_dtype": 3,
    "exporter/lowering/test_attention_function.py::test_parts_change_no_bit": 8,
    "exporter/lowering/test_attention_function.py::test_torch_operator_equals_reference": 3,
    "exporter/lowering/test_attention_function.py::test_what_is_known_of_a_node_changes_no_result": 3,
    "exporter/lowering/test_exported_file.py::test_fp16_file_is_close_to_upstream": 3,
    "exporter/lowering/test_exported_file.py::test_fp32_file_equals_upstream": 6,
    "exporter/lowering/test_fused_files.py::test_nodes_bodies_and_numbers": 2,
    "exporter/lowering/test_fused_functions.py::test_all_that_compute_it_agree": 12,
    "exporter/lowering/test_fused_functions.py::test_the_kernel_runs_and_not_the_body": 3,
    "exporter/models/test_aft_local.py::test_eight_thousand_positions_take_megabytes": 2,
    "exporter/models/test_aft_local.py::test_hard_numbers_in_the_file": 4,
    "exporter/models/test_aft_local.py::test_labmls_numbers": 4,
    "exporter/models/test_aft_local.py::test_the_file_has_labmls_numbers": 3,
    "exporter/models/test_against_upstream.py::test_equals_upstream": 3,
    "exporter/models/test_hugging_face.py::test_rounded_weights_state_what_they_cost": 2,
    "exporter/models/test_hugging_face.py::test_windows_are_read_off_the_models_own_masks": 3,
    "exporter/models/test_step_aft.py::test_equals_the_reference": 4,
    "exporter/models/test_step_modules.py::test_equals_upstreams_full_pass": 6,
    "exporter/source/test_dynamic_axes.py::test_every_class": 8,
    "exporter/source/test_dynamic_axes.py::test_one_dynamic_axis": 3,
    "exporter/source/test_dynamic_axes.py::test_open_sizes_equal_upstream": 4,
    "exporter/test_bisect.py::test_a_good_file_agrees_everywhere": 3,
    "exporter/test_export.py::test_every_class_passes_its_checks": 3,
    "exporter/test_export.py::test_every_opset": 3,
    "exporter/test_golden.py::test_a_wrong_argument_fails": 5,
    "exporter/test_precision_bf16.py::test_every_sort_of_model": 8,
    "exporter/test_step_export.py::test_every_class_passes_its_checks": 3,
    "exporter/test_step_positions.py::test_every_position_is_that_of_the_reference": 2,
    "exporter/user_module/test_export_module.py::test_a_model_passes_its_checks": 3,
    "exporter/user_module/test_export_module.py::test_half_a_head_as_wide_as_the_sequence_is_no_fault": 5,
    "exporter/user_module/test_export_module.py::test_memory_is_checked_whatever_divides_the_length": 2,
    "exporter/user_module/test_export_module.py::test_open_sizes": 5,
    "exporter/user_module/test_packages.py::test_a_published_model_exports_and_passes_every_check": 6,
    "exporter/user_module/test_replace.py::test_masks_and_biases": 3,
    "exporter/user_module/test_replace.py::test_mha_in_a_model": 3,
    "gpu/aot/test_aot_plugins.py::test_hands_over_the_kernel_of_the_contract": 3,
    "plugins/cpu/test_fused_kernels.py::test_numbers_do_not_depend_on_ranges_or_threads": 3,
    "plugins/cpu/test_fused_kernels.py::test_streams_of_every_size": 24,
    "plugins/cpu/test_fused_kernels.py::test_what_is_no_number_stays_in_its_token": 4,
    "plugins/cpu/test_cpu_kernel.py::test_every_geometry": 6,
    "plugins/cpu/test_cpu_kernel.py::test_windows_larger_than_a_block_of_keys": 2,
    "plugins/cpu/test_cpu_kernel_options.py::test_grouped": 2,
    "plugins/cpu/test_cpu_kernel_options.py::test_xpos": 3,
    "gpu/kernel/test_fp8_kernel.py::test_interpreted": 8,
    "gpu/kernel/test_kernel.py::test_every_geometry": 6,
    "gpu/kernel/test_kernel.py::test_every_head_size_and_type_with_its_own_tile": 3,
    "gpu/kernel/test_kernel.py::test_shared_heads_softcap_sinks_all_keys_and_xpos": 2,
    "gpu/kernel/test_ptx_kernel.py::test_a_row_of_lowest_biases_is_an_average": 2,
    "gpu/kernel/test_ptx_kernel.py::test_heads_whose_rows_align_with_nothing": 6,
    "gpu/kernel/test_ptx_kernel.py::test_huge_scores_are_averages_too": 6,
    "gpu/kernel/test_ptx_kernel.py::test_numbers": 14,
    "gpu/kernel/test_ptx_kernel.py::test_other_targets_have_the_same_text": 4,
    "gpu/kernel/test_ptx_kernel.py::test_shared_heads_all_keys_softcap_sinks_xpos_and_tensor_cores_for_fp32": 3,
    "gpu/kernel/test_ring_gpu_kernel.py::test_a_ring_may_be_written_in_place": 2,
    "gpu/kernel/test_ring_gpu_kernel.py::test_numbers_in_the_interpreter": 6,
    "gpu/kernel/test_ring_gpu_kernel.py::test_numbers_of_the_compiled_kernel": 19,
    "gpu/library/test_plugin_library.py::test_launch_has_the_arguments_of_the_contract": 8,
    "gpu/library/test_plugin_library.py::test_logger_of_every_release": 3,
    "gpu/library/test_plugin_numbers.py::test_a_launch_repeated": 4,
    "gpu/library/test_plugin_rtx.py::test_node_becomes_the_plugin_and_an_engine": 3,
    "reports/test_report_pages.py::test_a_phone_shows_it": 3,
    "robustness/test_bad_input_bounds.py::test_only_plain_files_are_read": 4,
    "robustness/test_bad_input_fuzz.py::test_sample": 4,
    "robustness/test_hostile_folders.py::test_no_command_follows_what_another_user_plants": 2,
    "robustness/test_library_trust.py::test_a_library_built_elsewhere_is_not_loaded_by_itself": 2,
    "robustness/test_library_trust.py::test_every_command_goes_through_it": 3,
    "robustness/test_option_bounds.py::test_no_number_helps_a_missing_file": 6,
    "robustness/test_option_bounds.py::test_numbers_beside_a_real_file": 6,
    "robustness/test_outputs.py::test_a_full_disk": 3,
    "robustness/test_outputs.py::test_an_input_is_never_written_over": 3,
    "robustness/test_outputs.py::test_names_of_another_kind_are_refused": 4,
    "robustness/test_outputs.py::test_what_is_there_stays": 4,
    "robustness/test_streams.py::test_an_export_on_broken_streams_is_whole": 2,
    "robustness/test_streams.py::test_commands_in_an_ascii_locale": 9,
    "robustness/test_streams.py::test_commands_on_broken_streams": 3,
    "robustness/test_streams.py::test_help_in_an_ascii_locale": 3,
    "gpu/tensorrt/test_step_session.py::test_logits_are_those_of_the_formula_however_tokens_come": 3,
    "runtime/generation/test_exported.py::test_modules_without_tokens_stream_too": 2,
    "runtime/inputs/test_example_inputs.py::test_random_inputs_begin_a_sequence": 3,
    "runtime/backends/onnxruntime/test_cpu_sessions.py::test_grouped_kernel_equals_reference_and_function": 3,
    "runtime/backends/onnxruntime/test_cpu_sessions.py::test_kernel_equals_reference_and_body": 6,
    "runtime/backends/onnxruntime/test_cpu_sessions.py::test_other_kinds_of_files": 2,
    "runtime/backends/onnxruntime/test_cpu_sessions.py::test_the_operator_runs_and_not_the_body": 3,
    "runtime/backends/openvino/test_openvino.py::test_a_file_as_it_was_exported_is_equal_to_onnxruntime": 3,
    "runtime/parity/test_parity_runners.py::test_every_runner_equals_the_reference": 4,
}


def thin(items: Sequence[pytest.Item]) -> None:
    """Mark the cases that the default run leaves out."""
    seen: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("slow") is not None:
            continue
        grid = item.nodeid.partition("[")[0].partition("tests/")[2]
        if grid in GRIDS:
            if seen[grid] % GRIDS[grid]:
                item.add_marker(pytest.mark.slow)
            seen[grid] += 1
