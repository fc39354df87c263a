"""Rows of the reliability bench that concern one process, each with a test of it."""

import ast
import re

import pytest

from tests.runs import ROOT

# What a row is about, a file, and tests in it; others name rows in their docstrings.
ROWS = """
C01 resumed, bitwise; training/test_loop.py
    test_stopped_and_resumed_is_bitwise_uninterrupted
C02 killed at random times; test_signals.py
    test_a_run_that_is_killed_fifty_times
C03 killed at each operation of a save; storage/test_each_operation.py
    test_a_run_survives_faults_at_operations_of_its_files
C04 resumed three times in an epoch; training/test_promises.py
    test_resumed_three_times_in_an_epoch_each_batch_comes_once
C05 on other devices; training/test_exact.py
    test_by_default_devices_change_within_rounding
C06 another environment is told; storage/test_facts.py
    test_what_changed_in_the_environment_is_one_line
    test_another_number_of_devices_is_in_that_line
C07 a flipped bit; storage/test_damages.py
    test_no_damage_is_restored_wrong_and_all_fall_back
C08 files cut or gone; storage/test_damages.py
    test_no_damage_is_restored_wrong_and_all_fall_back
C09 all damaged; storage/test_verified.py
    test_a_run_without_a_whole_step_stops_and_moves_nothing
C10 stray folders; storage/test_workdir.py
    test_a_folder_without_its_commit_file_is_no_checkpoint
    test_what_lies_among_the_checkpoints_changes_nothing
C11 a full disk; storage/test_failed_saves.py
    test_a_disk_that_is_full_for_a_while
C12 errors of a disk; storage/test_failed_saves.py
    test_a_command_whose_saves_all_fail_says_four_lines_and_ends_with_74
C13 SIGTERM; test_signals.py
    test_eight_moments_of_a_run
C14 a second signal; test_blocked.py
    test_a_save_that_blocks_is_left_and_the_checkpoint_before_is_whole
C15 Ctrl-C; test_blocked.py
    test_what_is_slow_is_waited_for_or_left_and_nothing_is_lost
C18 a hang; test_watchdog.py
    test_a_run_that_hangs_ends_with_its_stacks_and_is_saved
C21 one batch with a NaN; training/test_skipping.py
    test_a_step_that_is_not_finite_leaves_the_state_as_it_was
C22 NaN from a step on; training/test_skipping.py
    test_so_many_in_a_row_end_a_run
C23 back, and on without; training/test_rewind.py
    test_a_run_that_went_back_ends_without_the_batch
C24 a file larger than memory; training/test_tokens_run.py
    test_a_file_larger_than_memory_is_trained_on_from_the_host
    test_batches_of_a_file_larger_than_memory_stay_in_little
C25 no implicit copy; training/test_steps.py
    test_one_compilation_and_no_implicit_transfer
C26 one compilation; training/test_steps.py
    test_one_compilation_and_no_implicit_transfer
    test_each_start_of_a_run_compiles_its_step_once
C27 no large constants; training/test_promises.py
    test_no_program_of_a_run_has_a_large_constant
C28 memory used again; training/test_buffers.py
    test_memory_used_again_changes_no_number
C29 one set of devices; training/test_loop.py
    test_a_batch_committed_elsewhere_is_an_error_that_names_it
C30 batches that devices divide; devices/test_manager.py
    test_a_batch_that_cannot_be_sharded_names_the_nearest
C31 a GPU that cannot be had; test_commands.py
    test_a_gpu_that_cannot_be_used_is_refused_at_once_with_the_cause
C32 causes by the doctor; doctor/test_causes.py
    test_the_matrix_covers_the_table
C34 misspelled variables; doctor/test_causes.py
    test_each_cause_is_named_first
C35 processes of data; data/test_workers.py
    test_workers_import_no_jax
C36 leaked tracers; devices/test_leaks.py
    test_jit_inside_transform_names_the_parameters
C37 another structure; storage/test_checkpoint.py
    test_another_model_is_refused_with_every_difference
C38 hostile files; storage/test_bounded.py
    test_each_file_of_a_workdir_may_be_anything
    test_hostile_files_in_a_checkpoint_run_no_code
C39 no code of a workdir; test_trust.py
    test_no_command_runs_what_a_config_names
C40 types of a config; test_config.py
    test_values_that_cannot_be_are_refused
C41 memory over many saves; storage/test_growth.py
    test_a_hundred_saves_leave_little_in_memory
    test_a_run_that_saves_grows_by_less_than_a_kb_a_step
C42 saves while steps run; storage/test_checkpoint.py
    test_a_save_is_of_its_step_although_the_state_is_donated_on
C43 two runs in a workdir; test_commands.py
    test_a_second_run_in_a_workdir_is_refused_and_evaluation_disturbs_nobody
C44 the last good one stays; storage/test_failed_saves.py
    test_a_failed_save_is_a_sentence_and_the_next_one_is_made
C46 crash loops, and launchers that are killed; cluster/test_local.py
    test_starts_that_save_nothing_new_are_not_repeated
    test_the_launchers_end_is_that_of_its_processes
    test_restarts_are_counted_by_the_hour_of_a_clock_that_nobody_sets
C47 goodput; reporting/test_goodput.py
    test_lost_seconds_are_those_of_known_losses
C48 locked packages; cluster/test_image.py
    test_each_line_is_a_version_with_its_hashes
    test_a_wheel_with_another_hash_is_not_installed_as_the_image_installs
"""
# Of several processes, of GPUs, and of versions (`.ci/run`).
ELSEWHERE = {"C16", "C17", "C19", "C20", "C33", "C45"}
ELSEWHERE |= {"C49", "C50", "C51", "C52", "C53"}
EACH = re.findall(r"^(C\d\d) .*; (\S+)((?:\n    \S+)+)$", ROWS, re.M)
TESTS = [(row, path, name) for row, path, names in EACH for name in names.split()]


def test_each_row_is_there_once():
    ids = [row for row, _, _ in EACH]
    assert sorted([*ids, *ELSEWHERE]) == [f"C{n:02}" for n in range(1, 54)]


@pytest.mark.parametrize(("row", "path", "name"), TESTS)
def test_each_row_has_its_test(row, path, name):
    tree = ast.parse((ROOT / "tests" / path).read_text())
    assert name in [x.name for x in tree.body if isinstance(x, ast.FunctionDef)]
