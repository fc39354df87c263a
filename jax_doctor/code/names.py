"""Names that JAX, Haiku, optax and NumPy removed, as one table.

A line has the version, the module, its names, and after `=` what to write instead: a
path of the same meaning, where `{}` is the name itself, or words. A module stands for
all in it; with `import` before it, importing alone fails. `clip(a_min)` is an argument.
Versions are those of the repositories' tags; a test holds the rest against JAX.
"""

from typing import NamedTuple

# Why: docs/decisions/doctor.md#removed-names
NAMES = """
0.6.0 jax: tree_map = jax.tree.map
0.6.0 jax: tree_flatten = jax.tree.flatten
0.6.0 jax: tree_leaves = jax.tree.leaves
0.6.0 jax: tree_structure = jax.tree.structure
0.6.0 jax: tree_transpose = jax.tree.transpose
0.6.0 jax: tree_unflatten = jax.tree.unflatten
0.6.0 jax: treedef_is_leaf = jax.tree_util.treedef_is_leaf
0.3.16 jax: tree_multimap = jax.tree.map
0.3.16 jax.tree_util: tree_multimap = jax.tree.map
0.7.0 jax.tree_util: build_tree = jax.tree.unflatten(treedef, leaves)
0.4.24 jax.tree_util: register_keypaths = register_pytree_with_keys of jax.tree_util
0.4.24 jax.tree_util: AttributeKeyPathEntry = GetAttrKey of jax.tree_util
0.4.24 jax.tree_util: GetitemKeyPathEntry = SequenceKey or DictKey of jax.tree_util

0.10.0 jax: device_put_sharded = jax.device_put(numpy.stack(shards), sharding)
0.10.0 jax: device_put_replicated = \
jax.device_put(numpy.stack([x] * len(devices)), sharding)
0.4.36 jax: clear_backends = jax.extend.backend.clear_backends
0.4.34 jax: xla_computation = jax.jit(f).lower(...).compiler_ir("hlo")
0.2.12 jax: custom_transforms defjvp defjvp_all defvjp defvjp_all = jax.custom_jvp or \
jax.custom_vjp
0.2.21 jax: api = the same name in jax
0.2.14 jax: ad_util = jax.interpreters.ad
0.2.7 jax: lax_linalg = jax.lax.linalg
0.2.13 jax: lax_reference = numpy and scipy
0.3.16 jax: mask shapecheck = padding, and a mask of your own
0.3.18 jax: soft_pmap = jax.vmap under jax.jit
0.4.14 jax: partial_eval pxla xla = jax.interpreters.{}
0.4.14 jax: curry = functools.partial(functools.partial, f)
0.4.14 jax: ShapedArray = jax.core.{}
0.4.16 jax: jaxpr_util =
0.4.17 jax: abstract_arrays = jax.core
0.4.24 jax: linear_util = jax.extend.linear_util
0.4.24 jax: prng = jax.extend.random
0.8.0 jax: util = a copy of the few lines: it was never public
0.9.0 jax: array_ref ArrayRef = jax.new_ref, and jax.Ref
0.11.0 jax: cloud_tpu_init = nothing: it did nothing
0.4.25 jax.config: config = from jax import config
0.4.29 import jax.config = import jax, then jax.config
0.10.0 jax.ad_checkpoint: checkpoint remat = jax.checkpoint
0.2.22 jax.util: partial = functools.partial

0.8.0 jax.lib: xla_bridge = jax.extend.backend
0.8.0 jax.lib: xla_client xla_extension = the same name in jax, jax.extend or jaxlib
0.8.0 jax.lib.xla_bridge: get_backend get_compile_options = jax.extend.backend.{}
0.4.38 jax.lib.xla_bridge: default_backend = jax.{}
0.4.3 jax.lib.xla_bridge: device_count local_device_count process_index = jax.{}
0.2.21 jax.lib.xla_bridge: devices local_devices process_count = jax.{}
0.2.21 jax.lib.xla_bridge: host_id = jax.process_index
0.2.21 jax.lib.xla_bridge: host_count = jax.process_count
0.1.55 jax.lib.xla_bridge: canonicalize_dtype = jax.dtypes.canonicalize_dtype
0.5.0 jax.lib.xla_client: Device = jax.Device
0.5.0 jax.lib.xla_client: XlaRuntimeError = jax.errors.JaxRuntimeError
0.6.0 jax.lib.xla_client: ArrayImpl = jax.Array
0.6.0 jax.lib.xla_client: FftType = jax.lax.FftType
0.6.0 jax.lib.xla_extension: ArrayImpl = jax.Array
0.6.0 jax.lib.xla_extension: XlaRuntimeError = jax.errors.JaxRuntimeError
0.7.0 jax.lib.xla_extension: Device = jax.Device
0.6.1 jaxlib: xla_extension = the same name in jax or jax.extend
0.6.1 jaxlib.xla_extension: ArrayImpl = jax.Array
0.6.1 jaxlib.xla_extension: Device = jax.Device
0.6.1 jaxlib.xla_extension: XlaRuntimeError = jax.errors.JaxRuntimeError

0.2.21 jax.lib: pytree = jax.tree_util
0.3.14 jax.test_util: JaxTestCase JaxTestLoader = absl.testing, or pytest
0.3.22 jax.test_util: cases_from_list check_close check_eq device_under_test \
rand_uniform skip_on_devices = numpy.testing, or pytest

0.3.2 jax.ops: index_update = x.at[i].set(y)
0.3.2 jax.ops: index_add = x.at[i].add(y)
0.3.2 jax.ops: index_mul = x.at[i].multiply(y)
0.3.2 jax.ops: index_min = x.at[i].min(y)
0.3.2 jax.ops: index_max = x.at[i].max(y)
0.3.2 jax.ops: index = numpy.s_
0.4.24 jax.random: KeyArray PRNGKeyArray = jax.Array
0.4.24 jax.random: default_prng_impl = the name in jax.config.jax_default_prng_impl
0.4.24 jax.random: rbg_key = jax.random.PRNGKey(seed, impl="rbg")
0.4.24 jax.random: unsafe_rbg_key = jax.random.PRNGKey(seed, impl="unsafe_rbg")
0.4.24 jax.random: threefry2x32_key = jax.random.PRNGKey(seed, impl="threefry2x32")
0.4.24 jax.random: threefry2x32_p threefry_2x32 = jax.extend.random.{}
0.4.31 jax.random: shuffle = jax.random.permutation(key, x, independent=True)
0.4.29 jax.nn: normalize = jax.nn.standardize
0.3.15 jax.profiler: TraceContext = jax.profiler.TraceAnnotation
0.3.15 jax.profiler: StepTraceContext = jax.profiler.StepTraceAnnotation
0.3.15 jax.profiler: trace_function = jax.profiler.annotate_function

0.4.14 jax.numpy: DeviceArray = jax.Array
0.4.16 jax.numpy: alltrue = jax.numpy.all
0.4.16 jax.numpy: sometrue = jax.numpy.any
0.4.16 jax.numpy: product = jax.numpy.prod
0.4.16 jax.numpy: cumproduct = jax.numpy.cumprod
0.4.24 jax.numpy: row_stack = jax.numpy.vstack
0.4.24 jax.numpy: trapz = jax.numpy.trapezoid
0.4.24 jax.numpy: in1d = jax.numpy.isin, which keeps the shape
0.4.24 jax.numpy: issubsctype = jax.numpy.issubdtype(x.dtype, t)
0.4.24 jax.numpy: NINF = -jax.numpy.inf
0.4.24 jax.numpy: PZERO = 0.0
0.4.24 jax.numpy: NZERO = -0.0
0.4.9 jax.numpy: msort = jax.numpy.sort(a, axis=0)
0.4.38 jax.numpy: round_ = jax.numpy.round
0.10.0 jax.numpy: fix = jax.numpy.trunc
0.10.0 jax.numpy: clip(a) = the first argument, without a name
0.10.0 jax.numpy: clip(a_min) = min
0.10.0 jax.numpy: clip(a_max) = max
0.8.0 jax.numpy: percentile(interpolation) quantile(interpolation) = method
0.8.0 jax.numpy: nanpercentile(interpolation) nanquantile(interpolation) = method
0.4.36 jax.nn: softmax(initial) log_softmax(initial) = nothing: leave it out
0.6.0 jax: pure_callback(vectorized) = vmap_method
0.4.34 jax: ShapeDtypeStruct(named_shape) = nothing: leave it out
0.4.14 jax.experimental.pjit: pjit(in_axis_resources) = in_shardings of jax.jit
0.4.14 jax.experimental.pjit: pjit(out_axis_resources) = out_shardings of jax.jit

0.4.16 jax.lax: prod = math.prod
0.4.29 jax.lax: tie_in = its second argument
0.7.0 jax.lax: infeed infeed_p outfeed outfeed_p = jax.experimental.io_callback(f, ...)
0.9.0 jax.lax: zeros_like_array = jax.numpy.zeros_like
0.10.0 jax.lax: pvary = jax.lax.pcast(x, axes, to="varying")
0.4.24 jax.lax: dtypes itertools naryop naryop_dtype_rule standard_abstract_eval \
standard_naryop standard_primitive standard_unop unop unop_dtype_rule =
0.4.31 jax.lax: pdot xeinsum = jax.numpy.einsum under jax.shard_map
0.4.24 jax.scipy.linalg: tril triu = jax.numpy.{}
0.4.3 jax.scipy.linalg: polar_unitary = jax.scipy.linalg.polar
0.4.21 jax.scipy.linalg: solve(sym_pos) = assume_a="pos"
0.10.0 jax.scipy.special: sph_harm = sph_harm_y, with its arguments in another order
0.7.0 jax.dlpack: to_dlpack = the array itself: from_dlpack takes it
0.8.0 jax.dlpack: SUPPORTED_DTYPES = jax.dlpack.is_supported_dtype(dtype)
0.8.0 jax.custom_derivatives: custom_jvp_call_jaxpr_p =
0.7.0 jax.stages: OutInfo = jax.ShapeDtypeStruct

0.7.0 jax.sharding: PositionalSharding GSPMDSharding = jax.sharding.NamedSharding of a \
jax.sharding.Mesh
0.10.0 jax.sharding: PmapSharding = jax.sharding.NamedSharding of a jax.sharding.Mesh
0.4.34 jax.sharding: XLACompatibleSharding = jax.sharding.Sharding
0.4.12 jax.sharding: OpShardingSharding = jax.sharding.NamedSharding of a \
jax.sharding.Mesh
0.4.8 jax.sharding: MeshPspecSharding = jax.sharding.NamedSharding
0.7.1 jax.sharding: use_mesh = jax.set_mesh
0.5.3 jax.sharding: AxisTypes = jax.sharding.AxisType

0.8.0 jax.experimental: host_callback = jax.pure_callback, \
jax.experimental.io_callback or jax.debug.callback
0.8.0 jax.experimental.host_callback: id_tap call = jax.experimental.io_callback(f, ...)
0.4.35 jax.experimental.host_callback: id_print = jax.debug.print(...)
0.4.35 jax.experimental.host_callback: barrier_wait = jax.effects_barrier()
0.4.31 jax.experimental: maps = jax.shard_map, or jax.vmap under jax.jit
0.4.31 jax.experimental.maps: xmap = jax.shard_map, or jax.vmap under jax.jit
0.4.11 jax.experimental.maps: Mesh = jax.sharding.Mesh
0.3.8 jax.experimental.maps: mesh = jax.sharding.Mesh
0.4.31 jax.experimental.maps: thread_resources = jax.sharding.get_abstract_mesh()
0.4.11 jax.experimental.pjit: PartitionSpec NamedSharding = jax.sharding.{}
0.4.24 jax.experimental.pjit: with_sharding_constraint = jax.lax.{}
0.4.8 jax.experimental.pjit: FROM_GDA = nothing: give jax.Array
0.4.11 jax.experimental: PartitionSpec = jax.sharding.PartitionSpec
0.3.16 jax.experimental: with_sharding_constraint = jax.lax.{}
0.3.16 jax.experimental: sharded_jit = jax.jit with in_shardings
0.3.16 jax.experimental: stax optimizers = jax.example_libraries.{}
0.3.16 jax.experimental: loops = jax.lax.fori_loop or jax.lax.scan
0.4.7 jax.experimental: global_device_array = arrays of type jax.Array
0.4.11 jax.experimental: gda_serialization = jax.experimental.array_serialization
0.4.2 jax.experimental: callback =
0.4.36 jax.experimental: export = jax.export, whose functions changed
0.5.0 jax.experimental: array_api = jax.numpy
0.7.0 jax.experimental: shard = jax.sharding
0.7.0 jax.experimental: attrs =
0.9.0 jax.experimental: enable_x64 disable_x64 = jax.enable_x64(True) or (False)
0.9.0 jax.experimental: mutable_array MutableArray = jax.new_ref, and jax.Ref
0.8.2 jax.experimental: saved_input_vjp si_vjp = jax.vjp(f, *primals)
0.10.0 jax.experimental: custom_dce =
0.10.0 jax.experimental: x64_context = jax.enable_x64(True)
0.2.13 jax.experimental: doubledouble =
0.2.7 jax.experimental: optix = the package optax
0.2.6 jax.experimental: vectorize = jax.numpy.vectorize(f)
0.7.0 jax.experimental.layout: DeviceLocalLayout = jax.experimental.layout.Layout
0.8.0 jax.experimental.compilation_cache.compilation_cache: initialize_cache = \
jax.config.update("jax_compilation_cache_dir", path)
0.8.0 jax.extend: ffi = jax.ffi
0.7.0 jax.extend.backend: add_clear_backends_callback = \
register_backend_cache of jax.extend.backend

0.4.24 jax.core: TracerArrayConversionError TracerIntegerConversionError \
UnexpectedTracerError = jax.errors.{}
0.7.0 jax.core: ConcretizationTypeError = jax.errors.{}
0.6.0 jax.core: ClosedJaxpr Jaxpr JaxprEqn Literal Primitive Token Var jaxpr_as_fun = \
jax.extend.core.{}
0.7.0 jax.core: call_p closed_call_p = jax.extend.core.primitives.{}
0.11.0 jax.core: DebugInfo DropVar Effect Effects InconclusiveDimensionOperation \
JaxprTypeError check_jaxpr concrete_or_error find_top_trace gensym \
get_opaque_trace_state jaxprs_in_params new_jaxpr_eqn no_effects \
nonempty_axis_env_DO_NOT_USE primal_dtype_to_tangent_dtype \
unsafe_am_i_under_a_jit_DO_NOT_USE unsafe_am_i_under_a_vmap_DO_NOT_USE \
unsafe_get_axis_names_DO_NOT_USE valid_jaxtype = jax.extend.core.{}
0.11.0 jax.core: CallPrimitive JaxprPpContext JaxprPpSettings OutputType \
abstract_token aval_mapping_handlers call concretization_function_error \
custom_typechecks is_concrete is_constant_dim is_constant_shape literalable_types \
no_axis_name trace_ctx =
0.10.0 jax.core: AbstractToken TraceTag mapped_aval set_current_trace subjaxprs \
take_current_trace unmapped_aval = jax.extend.core.{}
0.10.0 jax.core: get_aval = jax.typeof(x)
0.10.0 jax.core: call_impl traverse_jaxpr_params =
0.8.2 jax.core: DShapedArray UnshapedArray = jax.core.ShapedArray(shape, dtype)
0.7.0 jax.core: axis_frame = jax.lax.axis_size(name)
0.7.0 jax.core: AxisName get_type trace_state_clean typecheck typematch =
0.6.0 jax.core: AxisSize EvalTrace InDBIdx InputType MapPrimitive OpaqueTraceState \
OutDBIdx TRACER_LEAK_DEBUGGER_WARNING concrete_aval dedup_referents \
escaped_tracer_error extend_axis_env_nd full_lower get_referent join_effects \
lattice_join leaked_tracer_error maybe_find_leaked_tracers raise_to_shaped \
raise_to_shaped_mappings reset_trace_state str_eqn_compact \
substitute_vars_in_output_ty typecompat used_axis_names_jaxpr =
0.4.38 jax.core: check_eqn check_type check_valid_jaxtype non_negative_dim =
0.4.36 jax.core: ConcreteArray MainTrace Sublevel TraceStack cur_sublevel \
extend_axis_env new_base_main new_main new_sublevel subst_axis_names \
subst_axis_names_jaxpr thread_local_state used_axis_names =
0.4.34 jax.core: pp_aval pp_eqn pp_eqn_rules pp_eqns pp_jaxpr pp_jaxprs pp_var pp_vars =
0.4.31 jax.core: NamedShape as_named_shape canonicalize_shape definitely_equal \
dimension_as_value join_named_shapes symbolic_equal_dim =
0.4.29 jax.core: Shape DimSize = tuple[int, ...], or int
0.4.27 jax.core: token = jax.lax.create_token()
0.4.24 jax.core: partial = functools.partial
0.4.24 jax.core: map zip safe_map safe_zip lu pp ref dtypes as_hashable_function \
source_info_util traceback_util tuple_delete tuple_insert total_ordering =
0.3.25 jax.core: named_call_p = jax.named_call(f)
0.4.3 jax.core: abstract_unit unit unitvar eval_jaxpr_eqn extract_call_jaxpr =

0.4.11 jax.interpreters.xla: Buffer DeviceArray = jax.Array
0.4.11 jax.interpreters.xla: Device = jax.Device
0.4.11 jax.interpreters.xla: device_put = jax.device_put
0.4.11 jax.interpreters.xla: xla_call_p = jax.extend.core.primitives.jit_p, another one
0.4.24 jax.interpreters.xla: ShapedArray = jax.core.ShapedArray
0.4.24 jax.interpreters.xla: AxisEnv ConcreteArray axis_groups backend_compile =
0.4.29 jax.interpreters.xla: TranslationContext TranslationRule XlaOp \
backend_specific_translations register_translation translations xla_destructure = \
jax.interpreters.mlir.register_lowering, or jax.ffi
0.4.36 jax.interpreters.xla: xb xc xe = jax.extend.backend, or jaxlib
0.7.0 jax.interpreters.xla: abstractify pytype_aval_mappings = jax.typeof(x)
0.8.0 jax.interpreters.xla: canonicalize_dtype = jax.dtypes.canonicalize_dtype
0.4.11 jax.interpreters.pxla: Mesh PartitionSpec = jax.sharding.{}
0.4.14 jax.interpreters.pxla: device_put = jax.device_put
0.4.14 jax.interpreters.pxla: ShardedDeviceArray = jax.Array
0.4.14 jax.interpreters.pxla: make_sharded_device_array = \
jax.make_array_from_single_device_arrays(shape, sharding, arrays)
0.10.0 jax.interpreters.pxla: Chunked MapTracer NoSharding PmapExecutable Replicated \
ShardedAxis ShardingSpec Unstacked parallel_callable shard_args spec_to_indices \
xla_pmap_p = jax.sharding.NamedSharding and jax.shard_map
0.11.0 jax.interpreters.pxla: ArrayMapping Index MeshAxisName MeshExecutable \
are_hlo_shardings_equal array_mapping_to_axis_resources op_sharding_to_indices \
global_aval_to_result_handler global_result_handlers is_hlo_sharding_replicated =
0.4.26 jax.interpreters.ad: config = jax.config
0.4.26 jax.interpreters.ad: source_info_util = jax.extend.source_info_util
0.4.36 jax.interpreters.ad: zeros_like_jaxval = jax.numpy.zeros_like
0.8.2 jax.interpreters.ad: closed_backward_pass vjp = jax.vjp(f, *primals)
0.9.0 jax.interpreters.ad: jvp_subtrace linear_jvp call_transpose \
linear_transpose linear_transpose2 map_transpose standard_jvp standard_jvp2 zero_jvp =
0.9.0 jax.interpreters.batching: BatchTrace BatchTracer batch batch_jaxpr \
broadcast_batcher matchaxis reducer_batcher vectorized_batcher =
0.9.0 jax.interpreters.batching: moveaxis = jax.numpy.moveaxis
0.10.2 jax.interpreters.batching: not_mapped = None
0.9.0 jax.interpreters.partial_eval: JaxprTrace DynamicJaxprTrace custom_staging_rules =
0.6.0 jax.interpreters.mlir: hlo func_dialect = the modules of jax.extend.mlir.dialects
0.8.0 jax.interpreters.mlir: custom_call dense_bool_array = the functions of jax.ffi
0.3.16 jax.interpreters: masking sharded_jit =

0.0.7 haiku: jit = jax.jit, around the function that hk.transform returns
0.0.10 haiku.experimental: named_call = jax.named_call
0.0.10 haiku.experimental: profiler_name_scopes = nothing: they are always on
0.1.8 optax: additive_weight_decay = optax.add_decayed_weights
0.1.8 optax: AdditiveWeightDecayState = optax.AddDecayedWeightsState
0.1.8 optax: hvp hessian_diag fisher_diag = optax.second_order.{}
0.1.8 optax: control_delta_method control_variates_jacobians moving_avg_baseline \
measure_valued_jacobians pathwise_jacobians score_function_jacobians =
0.2.5 optax: maybe_update = optax.conditionally_transform
0.2.5 optax: MaybeUpdateState = optax.ConditionallyTransformState
0.2.7 optax: monte_carlo =
0.1.8 optax.experimental: split_real_and_imaginary SplitRealAndImaginaryState = \
optax.contrib.{}
0.1.8 optax.experimental: named_chain = optax.named_chain
0.1.8 optax.experimental: GradientTransformationWithExtraArgs = \
optax.GradientTransformationExtraArgs

1.18.0 numpy: rank = numpy.ndim
1.23.0 numpy: alen = len
1.23.0 numpy: asscalar = x.item()
1.24.0 numpy: int float complex object str = {}
1.24.0 numpy: unicode = str
2.0.0 numpy: product = numpy.prod
2.0.0 numpy: cumproduct = numpy.cumprod
2.0.0 numpy: alltrue = numpy.all
2.0.0 numpy: sometrue = numpy.any
2.0.0 numpy: round_ = numpy.round
2.0.0 numpy: mat = numpy.asmatrix
2.0.0 numpy: Inf Infinity infty PINF = numpy.inf
2.0.0 numpy: NaN = numpy.nan
2.0.0 numpy: NINF = -numpy.inf
2.0.0 numpy: PZERO NZERO = 0.0 or -0.0
2.0.0 numpy: float_ = numpy.float64
2.0.0 numpy: complex_ cfloat = numpy.complex128
2.0.0 numpy: singlecomplex = numpy.complex64
2.0.0 numpy: longfloat = numpy.longdouble
2.0.0 numpy: clongfloat longcomplex = numpy.clongdouble
2.0.0 numpy: string_ = numpy.bytes_
2.0.0 numpy: unicode_ = numpy.str_
2.0.0 numpy: asfarray = numpy.asarray(x, dtype=float)
2.0.0 numpy: msort = numpy.sort(x, axis=0)
2.0.0 numpy: find_common_type = numpy.result_type(...)
2.0.0 numpy: cast = numpy.asarray(x, dtype)
2.0.0 numpy: DataSource = numpy.lib.npyio.DataSource
2.0.0 numpy: add_docstring add_newdoc tracemalloc_domain = numpy.lib.{}
2.0.0 numpy: byte_bounds = numpy.lib.array_utils.byte_bounds
2.0.0 numpy: compare_chararrays = numpy.char.compare_chararrays
2.0.0 numpy: format_parser = numpy.rec.format_parser
2.0.0 numpy: fastCopyAndTranspose = x.T.copy()
2.0.0 numpy: issctype = issubclass(x, numpy.generic)
2.0.0 numpy: issubclass_ = issubclass(a, b)
2.0.0 numpy: issubsctype = numpy.issubdtype(a, b)
2.0.0 numpy: nbytes = numpy.dtype(x).itemsize
2.0.0 numpy: obj2sctype = numpy.dtype(x).type
2.0.0 numpy: sctype2char = numpy.dtype(x).char
2.0.0 numpy: maximum_sctype sctypes = a dtype
2.0.0 numpy: recfromcsv recfromtxt = numpy.genfromtxt(...)
2.0.0 numpy: safe_eval = ast.literal_eval(text)
2.0.0 numpy: source = inspect.getsource(x)
2.0.0 numpy: deprecate deprecate_with_doc = warnings.deprecated, of Python 3.13
2.0.0 numpy: disp = print(x)
2.0.0 numpy: geterrobj seterrobj = numpy.errstate(...)
2.0.0 numpy: set_string_function = numpy.set_printoptions(...)
2.0.0 numpy: add_newdoc_ufunc get_array_wrap lookfor set_numeric_ops who =
2.3.0 numpy: compat =
2.4.0 numpy: in1d = numpy.isin(a, b).ravel()
2.4.0 numpy: trapz = numpy.trapezoid
2.5.0 numpy: row_stack = numpy.vstack
"""


class Removed(NamedTuple):
    """A removed name.

    Attributes:
      package: with the version, as in `jax 0.6.0`.
      instead: a dotted path that means the same, or words; empty if there is nothing.
    """

    name: str
    package: str
    instead: str

    def __str__(self) -> str:
        write = f"write {self.instead}" if self.instead else "nothing replaces it"
        return f"{self.name} was removed in {self.package}; {write}"


def _table() -> dict[str, Removed]:
    """Reads the lines: removed names by their path."""
    table = {}
    for line in filter(None, NAMES.split("\n")):
        names, _, instead = line.partition(" =")
        version, _, names = names.partition(" ")
        module, colon, names = names.partition(": ")
        package = "dm-haiku" if module.startswith("haiku") else module
        package = package.removeprefix("import ").partition(".")[0]
        for name in names.split() or [""]:
            path = f"{module}.{name}".removesuffix(".")
            advice = instead.strip().replace("{}", name)
            table[path] = Removed(path, f"{package} {version}", advice)
    return table


REMOVED = _table()
