// Tensors that say `cuda:k` and hold their values in host memory, for CPU builds of torch.
//
// Every operation without a composite implementation reaches `compute`, which runs its CPU kernel on views of the same
// memory. Views, copies and resizing have their own functions, because they change what a tensor refers to. The
// functions at the end are called from Python through ctypes.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

constexpr int kMost = 16;
thread_local DeviceIndex current_device = 0;
std::atomic<int> num_devices{8};

// --- counters -------------------------------------------------------------------------------------

std::mutex counter_lock;
std::map<std::string, int64_t> counters;
std::set<const void*> pinned;

void count(const std::string& name) {
  std::lock_guard<std::mutex> guard(counter_lock);
  counters[name] += 1;
}

// --- memory ---------------------------------------------------------------------------------------

struct Usage {
  std::atomic<int64_t> used{0}, peak{0}, capacity{int64_t(80) << 30};
};
std::array<Usage, kMost> usage;

void check_room(DeviceIndex device, int64_t bytes) {
  auto& own = usage[device];
  TORCH_CHECK_WITH(OutOfMemoryError, own.used + bytes <= own.capacity, "CUDA out of memory. Tried to allocate ", bytes,
                   " bytes. GPU ", int(device), " has ", own.capacity - own.used, " bytes free");
}

struct Block {  // memory of a device: host memory, counted while it exists
  at::DataPtr held;
  DeviceIndex device;
  int64_t bytes;
  Block(at::DataPtr data, DeviceIndex device, int64_t bytes)
      : held(std::move(data)), device(device), bytes(bytes) {
    check_room(device, bytes);
    int64_t now = usage[device].used += bytes;
    int64_t before = usage[device].peak;
    while (now > before && !usage[device].peak.compare_exchange_weak(before, now)) {}
  }
  ~Block() { usage[device].used -= bytes; }
};

at::DataPtr place(at::DataPtr data, DeviceIndex device, int64_t bytes) {
  auto* block = new Block(std::move(data), device, bytes);
  return {block->held.get(), block, [](void* held) { delete static_cast<Block*>(held); },
          Device(DeviceType::CUDA, device)};
}

struct DeviceMemory final : c10::Allocator {
  DeviceIndex device = 0;
  at::DataPtr allocate(size_t bytes) override {
    check_room(device, int64_t(bytes));
    return place(c10::GetCPUAllocator()->allocate(bytes), device, int64_t(bytes));
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
std::array<DeviceMemory, kMost> memories;

struct PinnedMemory final : c10::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    count("pinned_allocation");
    auto data = c10::GetCPUAllocator()->allocate(std::max<size_t>(bytes, 1));
    std::lock_guard<std::mutex> guard(counter_lock);
    pinned.insert(data.get());
    auto* block = new at::DataPtr(std::move(data));
    return {block->get(), block, [](void* held) {
      auto* block = static_cast<at::DataPtr*>(held);
      std::lock_guard<std::mutex> guard(counter_lock);
      pinned.erase(block->get());
      delete block;
    }, at::kCPU};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
PinnedMemory pinned_memory;

// --- tensors of the same memory -------------------------------------------------------------------

Tensor on_host(const Tensor& tensor) {
  auto* kept = new c10::Storage(tensor.storage());
  at::DataPtr data(tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get(), kept,
                   [](void* held) { delete static_cast<c10::Storage*>(held); }, at::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data),
                       c10::GetCPUAllocator(), true);
  auto found = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  found.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) found.unsafeGetTensorImpl()->_set_conj(true);
  if (tensor.is_neg()) found.unsafeGetTensorImpl()->_set_neg(true);
  return found;
}

Tensor on_device(const Tensor& tensor, DeviceIndex device) {
  auto* kept = new c10::Storage(tensor.storage());
  auto bytes = tensor.storage().nbytes();
  at::DataPtr data(tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get(), kept,
                   [](void* held) { delete static_cast<c10::Storage*>(held); }, at::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, place(std::move(data), device, int64_t(bytes)),
                       &memories[device], true);
  auto found = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), tensor.dtype());
  found.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return found;
}

DeviceIndex index_of(std::optional<Device> device) {
  auto index = device.has_value() && device->has_index() ? device->index() : current_device;
  TORCH_CHECK(index < num_devices, "CUDA error: invalid device ordinal: ", int(index));
  return index;
}

// --- operations -----------------------------------------------------------------------------------

const std::set<std::string> kMixed = {
    // operations that accept indices or sources on the CPU
    "aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::copy_",
    "aten::_local_scalar_dense",
};
const std::set<std::string> kWaiting = {
    // operations that return, or need, a value from the device, so that the host waits for it
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::bincount",
    "aten::unique_dim", "aten::_unique2", "aten::unique_consecutive", "aten::repeat_interleave",
};

struct Arguments {  // replaces an operation's tensors by those of the host, and its results by those of the device
  std::vector<std::pair<Tensor, Tensor>> pairs;
  std::optional<Device> device;
  std::string name;

  void see(const Tensor& tensor) {
    bool counts = tensor.is_cuda() || (tensor.dim() > 0 && tensor.is_cpu());
    if (!counts) return;
    if (device.has_value() && *device != tensor.device() && !kMixed.count(name)) {
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *device,
                  " and ", tensor.device(), "! (when checking arguments of ", name, ")");
    }
    if (!device.has_value() || tensor.is_cuda()) device = tensor.device();
  }

  Tensor replaced(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    see(tensor);
    if (!tensor.is_cuda()) return tensor;
    for (auto& [own, theirs] : pairs)
      if (own.is_same(tensor)) return theirs;
    pairs.emplace_back(tensor, on_host(tensor));
    return pairs.back().second;
  }

  c10::IValue replaced(const c10::IValue& value) {
    if (value.isTensor()) return replaced(value.toTensor());
    if (value.isDevice()) {
      auto named = value.toDevice();
      if (named.is_cuda()) device = Device(DeviceType::CUDA, index_of(named));
      return named.is_cuda() ? c10::IValue(Device(at::kCPU)) : value;
    }
    if (value.isGenerator()) {
      TORCH_CHECK(!device.has_value() || !device->is_cuda() || value.toGenerator().device().is_cuda(),
                  "Expected a 'cuda' device type for generator but found 'cpu'");
    }
    if (!value.isList()) return value;
    auto list = value.toList();
    bool has_tensors = false;
    for (const c10::IValue& item : list) has_tensors |= item.isTensor() || item.isList();
    if (!has_tensors) return value;
    auto found = c10::impl::GenericList(list.elementType());
    for (const c10::IValue& item : list) found.push_back(replaced(item));
    return found;
  }

  // An operation that was given an empty output has resized it.
  void take_sizes() {
    for (auto& [own, theirs] : pairs) {
      if (theirs.storage().data() != own.storage().data() && theirs.storage().nbytes()) {
        auto* kept = new c10::Storage(theirs.storage());
        at::DataPtr data(const_cast<void*>(theirs.storage().data()), kept,
                         [](void* held) { delete static_cast<c10::Storage*>(held); }, at::kCPU);
        auto bytes = theirs.storage().nbytes();
        own.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
            place(std::move(data), own.device().index(), int64_t(bytes)));
        own.storage().unsafeGetStorageImpl()->set_nbytes(bytes);
      }
      if (theirs.sizes() != own.sizes() || theirs.strides() != own.strides())
        own.unsafeGetTensorImpl()->set_sizes_and_strides(theirs.sizes(), theirs.strides(), theirs.storage_offset());
    }
  }

  Tensor returned(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu() || !device.has_value() || !device->is_cuda()) return tensor;
    for (auto& [own, theirs] : pairs)
      if (theirs.is_same(tensor)) return own;
    return on_device(tensor, device->index());
  }

  c10::IValue returned(const c10::IValue& value) {
    if (value.isTensor()) return returned(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> found;
    for (const Tensor& item : value.toTensorVector()) found.push_back(returned(item));
    return found;
  }
};

void compute(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Arguments arguments;
  arguments.name = schema.name();
  count(kWaiting.count(schema.name()) ? "wait:" + schema.name() : schema.name());
  const auto first = stack->size() - schema.arguments().size();
  for (size_t idx = first; idx < stack->size(); ++idx) (*stack)[idx] = arguments.replaced((*stack)[idx]);
  const bool counts_integers = schema.name() == "aten::histc" && !(*stack)[first].toTensor().is_floating_point();
  if (counts_integers) (*stack)[first] = (*stack)[first].toTensor().to(at::kFloat);  // only CUDA has this kernel
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (counts_integers) stack->back() = stack->back().toTensor().to(at::kInt);
  arguments.take_sizes();
  const auto results = stack->size() - schema.returns().size();
  for (size_t idx = results; idx < stack->size(); ++idx) (*stack)[idx] = arguments.returned((*stack)[idx]);
}

Tensor make_empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                  std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memories[index_of(device)], c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor make_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memories[index_of(device)],
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

bool is_pinned(const Tensor& tensor) {
  std::lock_guard<std::mutex> guard(counter_lock);
  return pinned.count(tensor.storage().data()) > 0;
}

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_cuda() != source.is_cuda()) {
    const bool is_up = self.is_cuda();
    // A copy from pageable memory is staged, so that the host needs to wait only for one into it.
    const bool waits = !non_blocking || (!is_up && !is_pinned(self));
    count(std::string(waits ? "wait:" : "") + (is_up ? "copy_to_device" : "copy_to_host"));
  }
  if (source.is_meta()) return self;
  Tensor to = self.is_cuda() ? on_host(self) : self;
  to.copy_(source.is_cuda() ? on_host(source) : source);
  return self;
}

Tensor copy_and_resize(const Tensor& self, const Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return to.copy_(self);
}

void record_stream(Tensor&, c10::Stream) {}

// CPUs have no product of 16-bit numbers that isn't rounded.
Tensor wide_product(const Tensor& self, const Tensor& other, at::ScalarType dtype) {
  return at::mm(self.to(dtype), other.to(dtype));
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &make_empty);
  library.impl("empty_strided", &make_strided);
  library.impl("copy_", &copy);
  library.impl("_copy_from_and_resize", &copy_and_resize);
  library.impl("record_stream", &record_stream);
  library.impl("mm.dtype", &wide_product);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("resize_", static_cast<const Tensor& (*)(const Tensor&, at::IntArrayRef,
                                                        std::optional<at::MemoryFormat>)>(&at::native::resize_));
  library.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(&at::native::set_));
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  // Composite, but they choose kernels by device.
  for (const char* name : {"convolution", "convolution_backward", "_grouped_mm"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute>());
}

// --- collectives ----------------------------------------------------------------------------------

// Waits as NCCL's kernels do: forever if a peer is gone, without an error.
struct BlockingWork final : c10d::Work {
  c10::intrusive_ptr<c10d::Work> inner;
  explicit BlockingWork(c10::intrusive_ptr<c10d::Work> work) : inner(std::move(work)) {}
  bool wait(std::chrono::milliseconds timeout) override {
    try {
      return inner->wait(timeout);
    } catch (const std::exception&) {
      for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
    }
  }
  bool isCompleted() override { return inner->isCompleted() && inner->isSuccess(); }
  bool isSuccess() const override { return inner->isSuccess(); }
  void synchronize() override { wait(kNoTimeout); }
  std::vector<Tensor> result() override { return inner->result(); }
};

// Uses the backend for the CPU.
void exchange(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  compute(op, keys, stack);
  static const bool blocks = std::getenv("ASTRAFLOW_POSING_BLOCKS") != nullptr;
  if (blocks && stack->back().isCustomClass())
    stack->back() = c10::IValue(c10::intrusive_ptr<c10d::Work>(
        c10::make_intrusive<BlockingWork>(stack->back().toCustomClass<c10d::Work>())));
}

TORCH_LIBRARY_IMPL(c10d, CUDA, library) {
  for (const char* name :
       {"broadcast_", "allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_",
        "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_",
        "reduce_scatter_tensor_coalesced_", "reduce_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "send",
        "recv_", "barrier"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&exchange>());
}

// --- devices --------------------------------------------------------------------------------------

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device device) const override {
    auto before = current_device;
    current_device = device.index();
    return Device(DeviceType::CUDA, before);
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, current_device); }
  void setDevice(Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  c10::Stream getStream(Device device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(Device device, int) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(num_devices.load()); }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace

namespace posing {

using at::CUDAHooksArgs;
using at::CUDAHooksInterface;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;

struct CUDAHooks final : CUDAHooksInterface {  // torch looks for this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return num_devices; }
  DeviceIndex deviceCount() const override { return DeviceIndex(num_devices.load()); }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { ::current_device = device; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(counter_lock);
    return pinned.count(data) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace posing

extern "C" {
void posing_set_up(int devices, int64_t capacity) {
  num_devices = devices;
  for (int idx = 0; idx < kMost; ++idx) {
    memories[idx].device = DeviceIndex(idx);
    usage[idx].capacity = capacity;
  }
}
int posing_device() { return current_device; }
void posing_set_device(int device) { current_device = DeviceIndex(device); }
int64_t posing_used(int device) { return usage[device].used; }
int64_t posing_peak(int device) { return usage[device].peak; }
int64_t posing_capacity(int device) { return usage[device].capacity; }
void posing_reset_peak(int device) { usage[device].peak = usage[device].used.load(); }
void posing_resize(c10::StorageImpl* storage, int64_t bytes) {
  if (bytes == 0) {
    storage->set_data_ptr_noswap(place(at::DataPtr(nullptr, at::kCPU), storage->device().index(), 0));
    storage->set_nbytes(0);
  } else {
    at::native::resize_bytes_cpu(storage, size_t(bytes));
  }
}
int posing_counters(char* text, int size) {  // returns the bytes that are needed
  std::lock_guard<std::mutex> guard(counter_lock);
  std::string found;
  for (auto& [name, number] : counters) found += name + " " + std::to_string(number) + "\n";
  if (int(found.size()) < size) std::copy(found.c_str(), found.c_str() + found.size() + 1, text);
  return int(found.size()) + 1;
}
void posing_reset_counters() {
  std::lock_guard<std::mutex> guard(counter_lock);
  counters.clear();
}
}
