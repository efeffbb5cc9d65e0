"""Old names of modules, by which saved models, checkpoints and functions name what they were made of.

A pickle names a class by its module, Spark's metadata and MLflow's flavor likewise. What was saved before modules were
merged and moved loads on: a name of :data:`OLD_NAMES` is imported as the module that has its contents today. Nothing
in this package uses an old name.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

OLD_NAMES = {
    "sparkdl.collective.failure_origin": "sparkdl.collective.error_origin",
    "sparkdl.data.arrow_release": "sparkdl.data.files.threads",
    "sparkdl.data.blend_state": "sparkdl.data.blend.blending",
    "sparkdl.data.blending": "sparkdl.data.blend.blending",
    "sparkdl.data.block_cache": "sparkdl.data.feed.cache",
    "sparkdl.data.blocks": "sparkdl.data.dataset.blocks",
    "sparkdl.data.course": "sparkdl.data.feed.state",
    "sparkdl.data.daemon_threads": "sparkdl.data.files.threads",
    "sparkdl.data.dataset.rows": "sparkdl.data.dataset.row_choice",
    "sparkdl.data.dataset.shards": "sparkdl.data.feed.shards",
    "sparkdl.data.drawn_rows": "sparkdl.data.dataset.row_choice",
    "sparkdl.data.epoch_plan": "sparkdl.data.feed.epoch_plan",
    "sparkdl.data.epoch_reader": "sparkdl.data.feed.epoch_reader",
    "sparkdl.data.failure_meanings": "sparkdl.data.files.failures",
    "sparkdl.data.feed.plan": "sparkdl.data.feed.epoch_plan",
    "sparkdl.data.feed_state": "sparkdl.data.feed.state",
    "sparkdl.data.files.watched": "sparkdl.data.files.changed_files",
    "sparkdl.data.filesystems": "sparkdl.data.files.filesystems",
    "sparkdl.data.footer_cache": "sparkdl.data.feed.cache",
    "sparkdl.data.input_files": "sparkdl.data.spark.input_files",
    "sparkdl.data.lease": "sparkdl.data.store.housekeeping",
    "sparkdl.data.materialization": "sparkdl.data.spark.materialization",
    "sparkdl.data.mixture": "sparkdl.data.blend.mixture",
    "sparkdl.data.packed_batch": "sparkdl.data.blend.packing",
    "sparkdl.data.packing": "sparkdl.data.blend.packing",
    "sparkdl.data.petastorm.columns_worker": "sparkdl.data.petastorm.worker",
    "sparkdl.data.petastorm.facades": "sparkdl.data.petastorm.containment",
    "sparkdl.data.petastorm.legacy_parquet": "sparkdl.data.dataset.legacy_parquet",
    "sparkdl.data.petastorm.ordered_pool": "sparkdl.data.petastorm.pool",
    "sparkdl.data.petastorm.planned_piece": "sparkdl.data.petastorm.reader",
    "sparkdl.data.petastorm.unischema_dataset": "sparkdl.data.petastorm.unischema",
    "sparkdl.data.petastorm.watched_files": "sparkdl.data.files.changed_files",
    "sparkdl.data.plan_text": "sparkdl.data.spark.plans",
    "sparkdl.data.planned_feed": "sparkdl.data.feed.planned_feed",
    "sparkdl.data.preparation": "sparkdl.data.dataset.dataset",
    "sparkdl.data.read_ahead": "sparkdl.data.files.threads",
    "sparkdl.data.row_filter": "sparkdl.data.dataset.row_choice",
    "sparkdl.data.row_stream": "sparkdl.data.feed.row_stream",
    "sparkdl.data.row_writer": "sparkdl.data.spark.writing",
    "sparkdl.data.shards": "sparkdl.data.feed.shards",
    "sparkdl.data.shuffle_order": "sparkdl.data.feed.batches",
    "sparkdl.data.spark.plan": "sparkdl.data.spark.plans",
    "sparkdl.data.state_checks": "sparkdl.data.checks",
    "sparkdl.data.uses": "sparkdl.data.store.housekeeping",
    "sparkdl.data.value_census": "sparkdl.data.spark.writing",
    "sparkdl.estimators.callables": "sparkdl.estimators.params.base",
    "sparkdl.estimators.checked_params": "sparkdl.estimators.params.base",
    "sparkdl.estimators.checkpoint_holder": "sparkdl.estimators.fit.checkpoint_lease",
    "sparkdl.estimators.checkpoint_mixins": "sparkdl.estimators.params.running",
    "sparkdl.estimators.column_check": "sparkdl.estimators.fit.inputs",
    "sparkdl.estimators.course_mixins": "sparkdl.estimators.params.training",
    "sparkdl.estimators.fit.runs": "sparkdl.estimators.fit.nested_runs",
    "sparkdl.estimators.fit.trials": "sparkdl.estimators.fit.dry_run",
    "sparkdl.estimators.fit_checkpoints": "sparkdl.estimators.fit.checkpoints",
    "sparkdl.estimators.fit_features": "sparkdl.estimators.fit.inputs",
    "sparkdl.estimators.fit_heads": "sparkdl.estimators.fit.labels",
    "sparkdl.estimators.fit_inputs": "sparkdl.estimators.fit.inputs",
    "sparkdl.estimators.fit_listener": "sparkdl.estimators.fit.progress",
    "sparkdl.estimators.fit_multiple": "sparkdl.estimators.fit.fit",
    "sparkdl.estimators.fit_on_rank": "sparkdl.training.remote.fit_on_rank",
    "sparkdl.estimators.fit_on_rows": "sparkdl.estimators.fit.fit",
    "sparkdl.estimators.fit_tracking": "sparkdl.estimators.fit.tracking",
    "sparkdl.estimators.fitting_estimator": "sparkdl.estimators.torch_estimator",
    "sparkdl.estimators.host_watch": "sparkdl.training.remote.host_watch",
    "sparkdl.estimators.input_mixins": "sparkdl.estimators.params.inputs",
    "sparkdl.estimators.label_mixins": "sparkdl.estimators.params.inputs",
    "sparkdl.estimators.labels": "sparkdl.estimators.fit.labels",
    "sparkdl.estimators.logged_params": "sparkdl.estimators.fit.tracking",
    "sparkdl.estimators.metric_trial": "sparkdl.estimators.fit.dry_run",
    "sparkdl.estimators.model_logging": "sparkdl.estimators.fit.tracking",
    "sparkdl.estimators.nested_runs": "sparkdl.estimators.fit.nested_runs",
    "sparkdl.estimators.notebook_bar": "sparkdl.estimators.fit.progress",
    "sparkdl.estimators.packed_features": "sparkdl.estimators.scoring.udf",
    "sparkdl.estimators.pandas_scoring": "sparkdl.estimators.scoring.udf",
    "sparkdl.estimators.param_mixins": "sparkdl.estimators.params.base",
    "sparkdl.estimators.place_of_fit": "sparkdl.estimators.fit.nested_runs",
    "sparkdl.estimators.progress": "sparkdl.estimators.fit.progress",
    "sparkdl.estimators.ready_made.classes": "sparkdl.estimators.fit.labels",
    "sparkdl.estimators.ready_made.image_classifier": "sparkdl.estimators.ready_made.images",
    "sparkdl.estimators.ready_made.image_params": "sparkdl.estimators.ready_made.images",
    "sparkdl.estimators.ready_made.models": "sparkdl.estimators.ready_made.estimator",
    "sparkdl.estimators.ready_made.ready_made_estimator": "sparkdl.estimators.ready_made.estimator",
    "sparkdl.estimators.ready_made.shared_arguments": "sparkdl.estimators.ready_made.params",
    "sparkdl.estimators.ready_made.single_row": "sparkdl.estimators.ready_made.estimator",
    "sparkdl.estimators.ready_made.table": "sparkdl.estimators.ready_made.tabular",
    "sparkdl.estimators.ready_made.text_classifier": "sparkdl.estimators.ready_made.text",
    "sparkdl.estimators.ready_made.text_params": "sparkdl.estimators.ready_made.text",
    "sparkdl.estimators.ready_made.vocabulary": "sparkdl.estimators.ready_made.text",
    "sparkdl.estimators.scored_columns": "sparkdl.estimators.scoring.columns",
    "sparkdl.estimators.scored_mixins": "sparkdl.estimators.params.inputs",
    "sparkdl.estimators.scoring_models": "sparkdl.estimators.scoring.models",
    "sparkdl.estimators.sent_weights": "sparkdl.estimators.scoring.models",
    "sparkdl.estimators.shown_figure": "sparkdl.estimators.summary_plot",
    "sparkdl.estimators.step_trial": "sparkdl.estimators.fit.dry_run",
    "sparkdl.estimators.stored_spec": "sparkdl.training.remote.transfer",
    "sparkdl.estimators.stored_values": "sparkdl.estimators.fit.labels",
    "sparkdl.estimators.summary_table": "sparkdl.estimators.summary",
    "sparkdl.estimators.tracking_mixins": "sparkdl.estimators.params.running",
    "sparkdl.estimators.training_rows": "sparkdl.estimators.fit.rows",
    "sparkdl.estimators.unsent_runs": "sparkdl.estimators.fit.nested_runs",
    "sparkdl.estimators.update_mixins": "sparkdl.estimators.params.training",
    "sparkdl.estimators.validation_mixins": "sparkdl.estimators.params.training",
    "sparkdl.estimators.validation_split": "sparkdl.estimators.fit.split",
    "sparkdl.estimators.weights": "sparkdl.estimators.fit.inputs",
    "sparkdl.horovod.torch.exceptions": "sparkdl.horovod.torch.names",
    "sparkdl.horovod.torch.operations.meeting": "sparkdl.horovod.torch.operations.barrier_and_join",
    "sparkdl.horovod.torch.operations.target": "sparkdl.horovod.torch.operations.preparation",
    "sparkdl.horovod.torch.reduce_ops": "sparkdl.horovod.torch.names",
    "sparkdl.launch.forkserver.kept": "sparkdl.launch.forkserver.reuse",
    "sparkdl.model.pyfunc": "sparkdl.model.served_model",
    "sparkdl.tracking.flavor": "sparkdl.tracking.mlflow_model",
    "sparkdl.training.architecture": "sparkdl.model.architecture",
    "sparkdl.training.batches": "sparkdl.training.device_batches",
    "sparkdl.training.best_weights": "sparkdl.training.callbacks",
    "sparkdl.training.checkpoint_choice": "sparkdl.training.checkpoint.choice",
    "sparkdl.training.checkpoint_files": "sparkdl.training.checkpoint.files",
    "sparkdl.training.checkpoint_folder": "sparkdl.training.checkpoint.folder",
    "sparkdl.training.checkpoint_writer": "sparkdl.training.checkpoint.folder",
    "sparkdl.training.checkpointing": "sparkdl.training.checkpoint.checkpointing",
    "sparkdl.training.class_scores": "sparkdl.model.predictor",
    "sparkdl.training.columns": "sparkdl.model.inputs",
    "sparkdl.training.converter_loader": "sparkdl.training.feed_dataset",
    "sparkdl.training.crossed_rows": "sparkdl.training.probe",
    "sparkdl.training.dataset_identity": "sparkdl.training.checkpoint.identity",
    "sparkdl.training.descriptions": "sparkdl.training.checkpoint.identity",
    "sparkdl.training.early_stopping": "sparkdl.training.callbacks",
    "sparkdl.training.finite": "sparkdl.training.step",
    "sparkdl.training.fit_course": "sparkdl.training.callbacks",
    "sparkdl.training.fit_identity": "sparkdl.training.checkpoint.identity",
    "sparkdl.training.fit_state": "sparkdl.training.checkpoint.state",
    "sparkdl.training.goal": "sparkdl.training.spec",
    "sparkdl.training.gradients": "sparkdl.training.probe",
    "sparkdl.training.hashing_file": "sparkdl.model.weights_file",
    "sparkdl.training.heads": "sparkdl.model.heads",
    "sparkdl.training.host_copy": "sparkdl.training.checkpoint.state",
    "sparkdl.training.identity_check": "sparkdl.training.checkpoint.identity",
    "sparkdl.training.loop": "sparkdl.training.trainer",
    "sparkdl.training.loss_sum": "sparkdl.training.history",
    "sparkdl.training.losses": "sparkdl.model.losses",
    "sparkdl.training.model_inputs": "sparkdl.model.inputs",
    "sparkdl.training.optimizer": "sparkdl.training.update",
    "sparkdl.training.output_range": "sparkdl.training.probe",
    "sparkdl.training.padding": "sparkdl.model.padding",
    "sparkdl.training.parametrized": "sparkdl.model.architecture",
    "sparkdl.training.pickled_modules": "sparkdl.model.saved_model",
    "sparkdl.training.precision": "sparkdl.training.update",
    "sparkdl.training.predictor": "sparkdl.model.predictor",
    "sparkdl.training.progress": "sparkdl.training.history",
    "sparkdl.training.pyfunc": "sparkdl.model.served_model",
    "sparkdl.training.random_state": "sparkdl.random_state",
    "sparkdl.training.rank_device": "sparkdl.training.trainer",
    "sparkdl.training.rank_state": "sparkdl.training.checkpoint.state",
    "sparkdl.training.reading_deadline": "sparkdl.training.device_batches",
    "sparkdl.training.ready_made": "sparkdl.networks",
    "sparkdl.training.ready_made.backbone_weights": "sparkdl.networks.backbones",
    "sparkdl.training.ready_made.backbones": "sparkdl.networks.backbones",
    "sparkdl.training.ready_made.first_weights": "sparkdl.networks.initial_weights",
    "sparkdl.training.ready_made.image_augmentation": "sparkdl.networks.images",
    "sparkdl.training.ready_made.image_inputs": "sparkdl.networks.images",
    "sparkdl.training.ready_made.image_network": "sparkdl.networks.images",
    "sparkdl.training.ready_made.image_pixels": "sparkdl.networks.images",
    "sparkdl.training.ready_made.moments": "sparkdl.networks.standardization",
    "sparkdl.training.ready_made.pretrained_folder": "sparkdl.networks.pretrained",
    "sparkdl.training.ready_made.pretrained_text": "sparkdl.networks.pretrained",
    "sparkdl.training.ready_made.residual_network": "sparkdl.networks.images",
    "sparkdl.training.ready_made.standardized_loss": "sparkdl.networks.standardization",
    "sparkdl.training.ready_made.tabular_inputs": "sparkdl.networks.tabular",
    "sparkdl.training.ready_made.tabular_network": "sparkdl.networks.tabular",
    "sparkdl.training.ready_made.text_inputs": "sparkdl.networks.text",
    "sparkdl.training.ready_made.text_network": "sparkdl.networks.text",
    "sparkdl.training.ready_made.tokenizers": "sparkdl.networks.text",
    "sparkdl.training.rectangular": "sparkdl.model.inputs",
    "sparkdl.training.saved_model": "sparkdl.model.saved_model",
    "sparkdl.training.seeds": "sparkdl.random_state",
    "sparkdl.training.served_columns": "sparkdl.model.served_columns",
    "sparkdl.training.signature": "sparkdl.model.signature",
    "sparkdl.training.step_failure": "sparkdl.training.objective",
    "sparkdl.training.torchmetrics_states": "sparkdl.training.metrics",
    "sparkdl.training.trial_copy": "sparkdl.training.probe",
    "sparkdl.training.user_step": "sparkdl.training.objective",
    "sparkdl.training.weights_file": "sparkdl.model.weights_file",
}
"""Today's module by the old one."""


class OldNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module by its old name, before other finders load it a second time below the old name of a package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module that has this old name."""
        del path, target
        return importlib.util.spec_from_loader(fullname, self) if fullname in OLD_NAMES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import today's module."""
        module = importlib.import_module(OLD_NAMES[spec.name])
        # The import system gives the module the old name's spec, which exec_module takes back.
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module, which has run already, its own spec back."""
        old = module.__spec__
        assert old is not None, "the import system has just set it"
        module.__spec__ = old.loader_state


def todays_name(name: str) -> str:
    """The full name that a class has today, by the one that it had when something was saved."""
    module, _, of_class = name.rpartition(".")
    return f"{OLD_NAMES.get(module, module)}.{of_class}"


def install() -> None:
    """Have Python find modules by their old names, too. May be called again."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldNames())
