// What torch's C++ asks a CUDA device for: how many there are, which one and which stream is current
// in this thread, pinned memory, generators. Autograd starts a thread per device that it finds here,
// runs a node of backward on the stream of its forward, and makes streams wait by events.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <atomic>
#include <cstring>
#include <mutex>
#include <unordered_set>
using namespace c10;

constexpr int MOST = 16;
static int number = 2;
static thread_local DeviceIndex current = 0;
static thread_local StreamId streams[MOST] = {};  // the current one of each device; 0: the default
static std::atomic<StreamId> made{0};
static void (*on_wait)(const char*) = nullptr;  // told of each wait of the host

static Device device_of(DeviceIndex k) { return Device(DeviceType::CUDA, k); }
static Stream stream_of(DeviceIndex k, StreamId id) { return Stream(Stream::UNSAFE, device_of(k), id); }
static void wait(const char* why) { if (on_wait) on_wait(why); }
static DeviceIndex exchange(DeviceIndex k) {
  TORCH_CHECK(k < number, "CUDA error: invalid device ordinal");
  auto before = current;
  if (k >= 0) current = k;
  return before;
}

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return number; }
  Device getDevice() const override { return device_of(current); }
  void setDevice(Device d) const override { exchange(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override { current = d.index(); }
  Device exchangeDevice(Device d) const override { return device_of(exchange(d.index())); }
  Stream getStream(Device d) const override { return stream_of(d.index(), streams[d.index()]); }
  Stream getDefaultStream(Device d) const override { return stream_of(d.index(), 0); }
  Stream getNewStream(Device d, int) const override { return stream_of(d.has_index() ? d.index() : current, ++made); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    auto k = s.device_index();
    auto before = streams[k];
    streams[k] = s.id();
    return stream_of(k, before);
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { wait("stream.synchronize"); }
  void synchronizeDevice(const DeviceIndex) const override { wait("synchronize"); }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override { *event = this_event(); }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override { wait("event.synchronize"); }
  double elapsedTime(void*, void*, const DeviceIndex) const override { wait("event.elapsed_time"); return 1; }
  static void* this_event() { static char one; return &one; }
};

// Pinned memory is the CPU's memory, remembered
static std::mutex pinning;
static std::unordered_set<const void*> pinned;
static void unpin(void* p) {
  { std::lock_guard<std::mutex> held(pinning); pinned.erase(p); }
  GetCPUAllocator()->raw_deallocate(p);
}
struct Pinning final : Allocator {
  DataPtr allocate(size_t n) override {
    void* p = GetCPUAllocator()->raw_allocate(n ? n : 1);
    { std::lock_guard<std::mutex> held(pinning); pinned.insert(p); }
    return {p, p, &unpin, Device(DeviceType::CPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};
static Pinning pinning_allocator;

// The CPU's generator under a device's name
struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(DeviceIndex k) {
    device_ = device_of(k < 0 ? current : k);
    key_set_ = DispatchKeySet(DispatchKey::CUDA);
  }
};

namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return number; }
  int getNumGPUs() const override { return number; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex k) const override { exchange(k); }
  DeviceIndex exchangeDevice(DeviceIndex k) const override { return exchange(k); }
  DeviceIndex maybeExchangeDevice(DeviceIndex k) const override { return exchange(k); }
  bool isPinnedPtr(const void* p) const override {
    std::lock_guard<std::mutex> held(pinning);
    return pinned.count(p) > 0;
  }
  Allocator* getPinnedMemoryAllocator() const override { return &pinning_allocator; }
  Generator getNewGenerator(DeviceIndex k) const override { return make_generator<DeviceGenerator>(k); }
};
}  // namespace at

// Torch has made its hooks when it was imported, for CUDA or for CPUs alone: that object gets the methods of these.
extern "C" void claim() {
  static at::CUDAHooks hooks;
  std::memcpy((void*)&at::detail::getCUDAHooks(), (void*)&hooks, sizeof(void*));
  impl::DeviceGuardImplRegistrar last(DeviceType::CUDA, new Guard());
}
extern "C" void set_number(int n) { number = n; }
extern "C" void set_on_wait(void (*f)(const char*)) { on_wait = f; }
extern "C" int get_number() { return number; }
